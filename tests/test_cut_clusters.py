"""Clusters with too many rows are cut into clusters of their own."""

import pytest
import torch

from tiered.clustering.areas import cluster_areas, cut_clusters


def clustered(length: int = 90, seed: int = 0):
    """A prefix of three directions and a suffix of rows that are all alike, in two groups."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(3, 8, generator=generator)
    rows = directions[torch.randint(0, 3, (2, length), generator=generator)]
    rows += 0.1 * torch.randn(2, length, 8, generator=generator)
    rows[:, 50:] = torch.randn(8, generator=generator)
    return rows, cluster_areas(rows, ((0, 40), (50, length)), 6)


@pytest.mark.parametrize("most", [1, 5, 7, 39])
def test_every_member_keeps_its_area_and_no_cluster_is_too_large(most: int):
    rows, indices = clustered()
    assert max(size for index in indices for size in index.sizes) > 7
    for group, (before, after) in enumerate(zip(indices, cut_clusters(rows, indices, most), strict=True)):
        after.check()
        assert max(after.sizes) <= most
        assert torch.equal(after.rows, before.rows)
        prefix = sum(after.sizes[: after.shares[0]])
        assert prefix == sum(before.sizes[: before.shares[0]]) == 40
        assert len(after.sizes) == sum(-(-size // most) for size in before.sizes)
        for cluster in range(after.clusters):
            members = rows[group, after.rows.split(after.sizes)[cluster]]
            torch.testing.assert_close(after.centroids[cluster], members.mean(0), atol=1e-5, rtol=1e-5)


def test_small_clusters_stay_as_they_are():
    rows, indices = clustered()
    for before, after in zip(indices, cut_clusters(rows, indices, 90), strict=True):
        assert after is before
