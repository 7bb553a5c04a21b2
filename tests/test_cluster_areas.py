"""Clusters over prefix and suffix: layout, means and medoids against plain loops, shares, padding, warm starts."""

import pytest
import torch
from cluster_checks import check_index, shares
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiered.clustering import tiles
from tiered.clustering.allocation import allocate_clusters, auto_clusters
from tiered.clustering.areas import cluster_areas
from tiered.clustering.cluster_index import ClusterIndex
from tiered.clustering.kmeans import kmeans
from tiered.clustering.summaries import means_and_medoids
from tiered.clustering.unit_rows import UnitRows


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(first: ClusterIndex, second: ClusterIndex) -> bool:
    """Whether two indices agree."""
    tensors = all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("rows", "medoids", "centroids"))
    return tensors and first.sizes == second.sizes


def check_against_rows(index: ClusterIndex, hidden: Tensor) -> None:
    """Centroids are means of the raw rows, medoids the members nearest to them."""
    check_index(index)
    for cluster in range(index.clusters):
        columns = index.rows.split(index.sizes)[cluster]
        members = hidden[columns].double()
        mean = members.mean(0)
        torch.testing.assert_close(index.centroids[cluster].double(), mean, atol=1e-5, rtol=0)
        cosine = torch.cosine_similarity(members, mean[None])
        medoid = columns.tolist().index(int(index.medoids[cluster]))
        assert cosine[medoid] >= cosine.max() - 2**-16


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, tuple[tuple[int, int], tuple[int, int]], Tensor | None, int]:
    """Hidden rows, areas, valid rows and a number of clusters that every group can have."""
    groups, length = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    bounds = sorted(draw(st.lists(st.integers(0, length), min_size=4, max_size=4)))
    areas = ((bounds[0], bounds[1]), (bounds[2], bounds[3]))
    valid = None
    if draw(st.booleans()):
        flags = st.lists(st.booleans(), min_size=length, max_size=length)
        valid = torch.tensor(draw(st.lists(flags, min_size=groups, max_size=groups)))
    here = torch.ones(groups, length, dtype=torch.bool) if valid is None else valid
    rows = [[int(group[first:stop].sum()) for first, stop in areas] for group in here]
    fewest = max((prefix > 0) + (suffix > 0) for prefix, suffix in rows)
    most = min(sum(counts) for counts in rows)
    if fewest > most:  # a group without valid rows beside one that has some: no number suits both
        valid, here = None, torch.ones(groups, length, dtype=torch.bool)
        rows = [[stop - first for first, stop in areas]] * groups
        fewest, most = sum(count > 0 for count in rows[0]), sum(rows[0])
    hidden = random(groups, length, 6, seed=draw(st.integers(0, 99)))
    return hidden, areas, valid, draw(st.integers(fewest, min(most, fewest + 9)))


@settings(max_examples=150)
@given(cases())
def test_clusters_of_every_group(case: tuple[Tensor, tuple[tuple[int, int], tuple[int, int]], Tensor | None, int]):
    hidden, areas, valid, clusters = case
    groups, length, _ = hidden.shape
    here = torch.ones(groups, length, dtype=torch.bool) if valid is None else valid
    inside = torch.zeros(groups, length, dtype=torch.bool)
    for first, stop in areas:
        inside[:, first:stop] = here[:, first:stop]
    # Rows outside the areas and invalid rows are never read.
    indices = cluster_areas(hidden.where(inside[..., None], torch.nan), areas, clusters, valid=valid)
    assert len(indices) == groups
    for group, index in enumerate(indices):
        check_against_rows(index, hidden[group])
        counts = [int(here[group, first:stop].sum()) for first, stop in areas]
        prefix, suffix = allocate_clusters(clusters, counts[0], counts[1])
        assert sorted(index.rows.tolist()) == inside[group].nonzero()[:, 0].tolist()
        in_prefix = [set(range(*areas[0])) >= set(members.tolist()) for members in index.rows.split(index.sizes)]
        assert in_prefix == [True] * prefix + [False] * suffix


@pytest.mark.parametrize("elements", [None, 100])
def test_each_area_is_clustered_by_k_means(elements: int | None, monkeypatch: pytest.MonkeyPatch):
    if elements is not None:
        monkeypatch.setattr(tiles, "CPU_ELEMENTS", elements)
    hidden = random(3, 90, 12)
    for group, index in enumerate(cluster_areas(hidden, ((4, 50), (58, 90)), 7, iterations=3, seed=5)):
        assert shares(index, 50) == (4, 3)
        for (first, stop), offset, share in (((4, 50), 0, 4), ((58, 90), 4, 3)):
            rows = UnitRows.of(hidden[group, None, first:stop])
            alone = kmeans(rows, share, iterations=3, seed=5, backend="torch")
            assert torch.equal(index.cluster_of(90)[first:stop], alone[0] + offset)
        check_against_rows(index, hidden[group])


def test_groups_are_independent():
    """Sequences with different padding have different shares, in any order."""
    hidden, valid = random(5, 60, 8), torch.ones(5, 60, dtype=torch.bool)
    valid[1, :20] = valid[3, :20] = valid[4, :20] = valid[2, 55:] = False
    areas = ((0, 30), (38, 60))
    together = cluster_areas(hidden, areas, 6, valid=valid)
    assert len({shares(index, 30) for index in together}) > 1
    for group, index in enumerate(together):
        alone = cluster_areas(hidden[group, None], areas, 6, valid=valid[group, None])[0]
        assert same(index, alone)


def test_left_padding_is_as_if_it_were_not_there():
    rows = random(2, 50, 8)
    hidden = torch.cat([torch.full((2, 14, 8), torch.nan), rows], dim=1)
    valid = (torch.arange(64) >= 14).expand(2, -1)
    padded = cluster_areas(hidden, ((0, 40), (48, 64)), "auto", valid=valid)
    bare = cluster_areas(rows, ((0, 26), (34, 50)), "auto")
    for one, other in zip(padded, bare, strict=True):
        assert one.sizes == other.sizes
        assert torch.equal(one.rows - 14, other.rows) and torch.equal(one.medoids - 14, other.medoids)
        torch.testing.assert_close(one.centroids, other.centroids, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("prefix", "suffix"), [(200, 100), (0, 100), (70, 0), (3, 3), (0, 0)])
def test_auto(prefix: int, suffix: int):
    index = cluster_areas(random(1, 310, 4), ((0, prefix), (310 - suffix, 310)))[0]
    assert shares(index, prefix) == allocate_clusters(auto_clusters(prefix, suffix), prefix, suffix)
    assert index.clusters == auto_clusters(prefix, suffix)
    check_index(index)


def test_centroids_are_of_the_rows_dtype_and_float32_sums():
    """1 + 256 ones: summed in bfloat16 they would stay at 256."""
    hidden = torch.ones(1, 600, 3, dtype=torch.bfloat16)
    raw = cluster_areas(hidden, ((0, 600), (600, 600)), 1)[0]
    assert raw.centroids.dtype == torch.bfloat16 and raw.centroids.tolist() == [[1.0, 1.0, 1.0]]


def test_an_index_holds_no_memory_but_its_own():
    index = cluster_areas(random(3, 50, 6), ((0, 20), (28, 50)), 4)[1]
    for tensor in (index.rows, index.centroids, index.medoids):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_both_backends():
    hidden = random(2, 90, 12)
    ours, theirs = (cluster_areas(hidden, ((0, 50), (58, 90)), 6, backend=backend) for backend in ("torch", "faiss"))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.rows, other.rows)
        check_against_rows(other, hidden[0] if other is theirs[0] else hidden[1])


def test_means_and_medoids_of_awkward_clusters():
    rows = torch.tensor([[[2.0, 0.0], [0.0, 0.0], [-2.0, 0.0], [3.0, 3.0], [0.0, 0.0], [1.0, 0.9], [5.0, 1.0]]])
    rows[0, 6] = torch.nan
    assignment = torch.tensor([[0, 0, 0, 1, 2, 1, -1]])
    means, medoids = means_and_medoids(rows, assignment, 4)
    torch.testing.assert_close(means, torch.tensor([[[0.0, 0.0], [2.0, 1.95], [0.0, 0.0], [0.0, 0.0]]]))
    assert medoids.tolist() == [[0, 3, 4, 7]]  # without a direction all are alike; without a member there is none


TOKENS, MASK = random(8, 32), random(32, seed=1)
ALIKE: dict[str, Tensor] = {
    "masks": MASK.expand(24, -1),
    "masks and tokens": torch.cat([MASK.expand(8, -1), TOKENS[:4], MASK.expand(9, -1), TOKENS[4:7]]),
    "two tokens in turn": TOKENS[:2].repeat(12, 1),
    "two tokens": TOKENS[:2],
    "each token twice": TOKENS.repeat(2, 1),
}
# In bfloat16 equal rows that are far from their centroid are not equally near to it.
CASES = [(name, torch.float32) for name in ALIKE] + [(name, torch.bfloat16) for name in [*ALIKE][:-1]]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_rows_that_differ_by_rounding_are_equal(name: str, dtype: torch.dtype):
    """Every group has the rows of the first, off by less than a unit in the last place."""
    rows = ALIKE[name]
    n = len(rows)
    generator = torch.Generator().manual_seed(2)
    noise = 1 + torch.finfo(dtype).eps * (torch.rand(12, 2 * n, 32, generator=generator) - 0.5)
    hidden = (torch.cat([rows, rows.flip(0)]) * noise).to(dtype)
    found = cluster_areas(hidden, ((0, n), (n, 2 * n)), min(9, 2 * n))
    for index in found:
        check = [index.rows.tolist(), index.sizes, index.medoids.tolist()]
        assert check == [found[0].rows.tolist(), found[0].sizes, found[0].medoids.tolist()]


HIDDEN = random(2, 40, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clusters": 1}, "clusters = 1 cannot be shared"),
        ({"clusters": 33}, "allowed: 2 to 32"),
        ({"clusters": 5, "valid": torch.arange(40).expand(2, -1) < 4}, "allowed: 1 to 4"),
        ({"hidden": torch.full((2, 40, 6), torch.nan)}, "not finite"),
        ({"hidden": -torch.inf * HIDDEN}, "not finite"),
        ({"hidden": 3e38 * HIDDEN}, "exceeds float32"),
        ({"hidden": 1e300 * HIDDEN.double()}, "exceeds float32"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        cluster_areas(**{"hidden": HIDDEN, "areas": ((0, 16), (24, 40)), "clusters": 4, **arguments})
