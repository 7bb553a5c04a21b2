"""Clusters over prefix and suffix: layout, means and medoids against plain loops, shares, padding, warm starts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiered.clustering import tiles
from tiered.clustering.allocation import allocate_clusters, auto_clusters
from tiered.clustering.areas import cluster_areas
from tiered.clustering.cluster_index import ClusterIndex
from tiered.clustering.spherical import spherical_kmeans
from tiered.clustering.summaries import means_and_medoids


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(first: ClusterIndex, second: ClusterIndex) -> bool:
    """Whether two indices agree."""
    tensors = all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in ("rows", "counts", "medoids", "centroids")
    )
    return tensors and first.sizes == second.sizes and first.shares == second.shares


def check_against_rows(index: ClusterIndex, hidden: Tensor) -> None:
    """Centroids are means of the raw rows, medoids the members nearest to them."""
    index.check()
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
    # What is outside the areas or invalid is never looked at.
    indices = cluster_areas(hidden.where(inside[..., None], torch.nan), areas, clusters, valid=valid)
    assert len(indices) == groups
    for group, index in enumerate(indices):
        check_against_rows(index, hidden[group])
        counts = [int(here[group, first:stop].sum()) for first, stop in areas]
        assert index.shares == allocate_clusters(clusters, counts[0], counts[1])
        assert sorted(index.rows.tolist()) == inside[group].nonzero()[:, 0].tolist()
        in_prefix = [set(range(*areas[0])) >= set(members.tolist()) for members in index.rows.split(index.sizes)]
        assert in_prefix == [True] * index.shares[0] + [False] * index.shares[1]


@pytest.mark.parametrize("elements", [None, 100])
def test_each_area_is_clustered_by_k_means(elements: int | None, monkeypatch: pytest.MonkeyPatch):
    if elements is not None:
        monkeypatch.setattr(tiles, "CPU_ELEMENTS", elements)
    hidden = random(3, 90, 12)
    for group, index in enumerate(cluster_areas(hidden, ((4, 50), (58, 90)), 7, iterations=3, seed=5)):
        assert index.shares == (4, 3)
        for (first, stop), offset, share in (((4, 50), 0, 4), ((58, 90), 4, 3)):
            alone = spherical_kmeans(hidden[group, None, first:stop], share, iterations=3, seed=5)
            expected = torch.full((90,), -1)
            expected[first:stop] = alone.assignment[0] + offset
            found = index.cluster_of(90)
            assert torch.equal(found[first:stop], expected[first:stop])
        check_against_rows(index, hidden[group])


def test_groups_do_not_know_of_each_other():
    """Sequences with different padding have different shares, in whatever order they come."""
    hidden, valid = random(5, 60, 8), torch.ones(5, 60, dtype=torch.bool)
    valid[1, :20] = valid[3, :20] = valid[4, :20] = valid[2, 55:] = False
    areas = ((0, 30), (38, 60))
    together = cluster_areas(hidden, areas, 6, valid=valid)
    assert len({index.shares for index in together}) > 1
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
    assert index.shares == allocate_clusters(auto_clusters(prefix, suffix), prefix, suffix)
    assert index.clusters == auto_clusters(prefix, suffix)
    index.check()


def test_a_warm_start_goes_on_where_it_was():
    hidden = random(2, 100, 10)
    areas = ((0, 50), (58, 100))
    first = cluster_areas(hidden, areas, 8, iterations=2)
    more = cluster_areas(hidden, areas, 8, iterations=2, previous=first)
    cold = cluster_areas(hidden, areas, 8, iterations=2, seed=9)
    # The mean of the raw rows is not the mean direction: what a warm start continues from is the centroid.
    for group in range(2):
        found = more[group].cluster_of(100)
        for (start, stop), offset in (((0, 50), 0), ((58, 100), 4)):
            centroids = first[group].centroids[None, offset : offset + 4]
            rows = hidden[group, None, start:stop]
            alone = spherical_kmeans(rows, 4, start=centroids, iterations=2)
            assert torch.equal(found[start:stop], alone.assignment[0] + offset)
        assert not torch.equal(found, cold[group].cluster_of(100))
        check_against_rows(more[group], hidden[group])


def test_an_area_with_another_share_starts_cold():
    hidden = random(2, 120, 10)
    before = cluster_areas(hidden, ((0, 40), (48, 120)), 6, seed=3)
    assert before[0].shares == (2, 4)
    areas = ((0, 40), (40, 110))
    warm = cluster_areas(hidden, areas, 7, iterations=1, previous=before)
    cold = cluster_areas(hidden, areas, 7, iterations=1)
    assert warm[0].shares == cold[0].shares == (3, 4)
    for one, other in zip(warm, cold, strict=True):
        assert torch.equal(one.cluster_of(120)[:40], other.cluster_of(120)[:40])
        assert not torch.equal(one.cluster_of(120)[40:110], other.cluster_of(120)[40:110])


def test_centroids_are_of_the_rows_dtype_and_float32_sums():
    """1 + 256 ones: summed in bfloat16 they would stay at 256."""
    hidden = torch.ones(1, 600, 3, dtype=torch.bfloat16)
    raw = cluster_areas(hidden, ((0, 600), (600, 600)), 1)[0]
    assert raw.centroids.dtype == torch.bfloat16 and raw.centroids.tolist() == [[1.0, 1.0, 1.0]]


def test_an_index_holds_no_memory_but_its_own():
    index = cluster_areas(random(3, 50, 6), ((0, 20), (28, 50)), 4)[1]
    for tensor in (index.rows, index.counts, index.centroids, index.medoids):
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
def test_rows_that_are_equal_but_for_rounding_are_equal(name: str, dtype: torch.dtype):
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
INDICES = cluster_areas(HIDDEN, ((0, 16), (24, 40)), 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"areas": ((0, 16), (24, 41))}, "two spans of 40 columns"),
        ({"areas": ((0, 25), (24, 40))}, "in order and apart"),
        ({"areas": ((24, 40), (0, 16))}, "in order and apart"),
        ({"areas": ((-1, 16), (24, 40))}, "two spans"),
        ({"areas": ((9, 3), (24, 40))}, "two spans"),
        ({"clusters": "many"}, "clusters = 'many'; allowed: an int or 'auto'"),
        ({"clusters": 1}, "clusters = 1 cannot be shared"),
        ({"clusters": 33}, "allowed: 2 to 32"),
        ({"clusters": 5, "valid": torch.arange(40).expand(2, -1) < 4}, "allowed: 1 to 4"),
        ({"valid": torch.ones(2, 39, dtype=torch.bool)}, "valid"),
        ({"valid": torch.ones(2, 40)}, "valid"),
        ({"previous": INDICES[:1]}, "1 indices for 2 groups"),
        ({"previous": cluster_areas(HIDDEN[..., :3], ((0, 16), (24, 40)), 4)}, "width 3 .* allowed: width 6"),
        ({"hidden": torch.full((2, 40, 6), torch.nan)}, "not finite"),
        ({"backend": "scipy"}, "unknown backend 'scipy'"),
        ({"iterations": -1}, "iterations = -1"),
    ],
)
def test_what_is_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        cluster_areas(**{"hidden": HIDDEN, "areas": ((0, 16), (24, 40)), "clusters": 4, **arguments})
