"""Clusters with too many rows are cut into clusters of their own."""

import pytest
import torch
from cluster_checks import check_index, shares
from torch import Tensor

from tiered.clustering.areas import cluster_areas, cut_clusters
from tiered.clustering.cluster_index import ClusterIndex


def clustered(dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[ClusterIndex]]:
    """Two groups, of six clusters and of three: a prefix of three directions, and a suffix of rows that are all alike.
    Outside of both, and at what the second group pads with, nothing is a number."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(3, 8, generator=generator)
    rows = directions[torch.randint(0, 3, (2, 90), generator=generator)]
    rows += 0.1 * torch.randn(2, 90, 8, generator=generator)
    rows[:, 50:] = torch.randn(8, generator=generator)
    valid = torch.arange(90)[None] >= torch.tensor([0, 9])[:, None]
    rows = rows.to(dtype).masked_fill(~valid[..., None], torch.nan)
    rows[:, 40:50] = torch.nan
    indices = [
        cluster_areas(rows[g : g + 1], ((0, 40), (50, 90)), clusters, valid=valid[g : g + 1])[0]
        for g, clusters in enumerate((6, 3))
    ]
    return rows, indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("most", [1, 5, 7, 38])
def test_every_member_keeps_its_area_and_no_cluster_is_too_large(most: int, dtype: torch.dtype):
    rows, indices = clustered(dtype)
    assert max(size for index in indices for size in index.sizes) > 7
    for group, (before, after) in enumerate(zip(indices, cut_clusters(rows, indices, most), strict=True)):
        check_index(after)
        assert max(after.sizes) <= most
        assert torch.equal(after.rows, before.rows)
        prefix = sum(after.sizes[: shares(after, 40)[0]])
        assert prefix == sum(before.sizes[: shares(before, 40)[0]]) == (40, 31)[group]
        assert len(after.sizes) == sum(-(-size // most) for size in before.sizes)
        assert after.centroids.dtype == dtype
        for cluster, columns in enumerate(after.rows.split(after.sizes)):
            members = rows[group, columns].double()
            mean, far = members.mean(0), 1e-5 if dtype == torch.float32 else 1e-3
            torch.testing.assert_close(after.centroids[cluster].double(), mean, atol=far, rtol=far)
            alike = torch.cosine_similarity(members, mean[None])
            assert alike[columns == after.medoids[cluster]] >= alike.max() - 1e-6


def test_small_clusters_stay_as_they_are():
    rows, indices = clustered()
    for before, after in zip(indices, cut_clusters(rows, indices, 40), strict=True):
        assert after is before


def test_nothing_has_nothing_to_cut():
    rows = torch.randn(2, 8, 6)
    indices = cluster_areas(rows, ((0, 0), (8, 8)), "auto")
    assert [index.clusters for index in cut_clusters(rows, indices, 1)] == [0, 0]
