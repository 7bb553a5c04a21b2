"""The index of clusters: look-ups against plain lists, and centroids that move."""

from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiered.clustering.cluster_index import ClusterIndex

WIDTH = 5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(members: list[list[int]], centroids: Tensor | None = None) -> ClusterIndex:
    """An index of clusters with these columns; medoids are the last ones."""
    sizes = tuple(map(len, members))
    return ClusterIndex(
        rows=torch.tensor([column for cluster in members for column in cluster], dtype=torch.int64),
        sizes=sizes,
        counts=torch.tensor(sizes, dtype=torch.int64),
        shares=(len(members), 0),
        centroids=random(len(members), WIDTH) if centroids is None else centroids,
        medoids=torch.tensor([cluster[-1] for cluster in members], dtype=torch.int64),
        version=3,
    )


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """The length of a canvas, and clusters over some of its columns."""
    length = draw(st.integers(0, 30))
    columns = draw(st.permutations(range(length)))[: draw(st.integers(0, length))]
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(columns) - 1))))) if len(columns) > 1 else []
    bounds = [0, *cuts, len(columns)]
    members = [sorted(columns[first:stop]) for first, stop in pairwise(bounds)]
    return length, members if columns else []


@given(partitions())
def test_look_ups(partition: tuple[int, list[list[int]]]):
    length, members = partition
    index = build(members)
    index.check()
    assert index.clusters == len(members)
    assert list(index.starts) == [sum(map(len, members[:cluster])) for cluster in range(len(members))]
    expected = [-1] * length
    for cluster, columns in enumerate(members):
        assert index.members(cluster).tolist() == columns
        assert index.rows[index.slice_of(cluster)].tolist() == columns
        for column in columns:
            expected[column] = cluster
    assert index.cluster_of(length).tolist() == expected


@pytest.mark.parametrize("cluster", [-1, 2])
def test_a_cluster_that_is_not_there(cluster: int):
    index = build([[0, 4], [1]])
    for call in (index.members, index.slice_of):
        with pytest.raises(ValueError, match=f"cluster = {cluster}; allowed: 0 to 1"):
            call(cluster)


def test_after_many_moves_a_centroid_is_the_mean():
    members = [[0, 3, 7, 8], [1], [2, 4, 5, 6, 9, 10, 11]]
    rows = 3 * random(12, WIDTH)
    index = build(members, torch.stack([rows[columns].mean(0) for columns in members]))
    first, at_first = index, index.centroids.clone()
    cluster_of = index.cluster_of(12)
    generator = torch.Generator().manual_seed(1)
    for step in range(200):
        columns = torch.randperm(12, generator=generator)[: 1 + step % 12]
        new = rows[columns] + torch.randn(len(columns), WIDTH, generator=generator)
        index = index.moved(cluster_of[columns], rows[columns], new)
        rows[columns] = new
        assert index.version == 4 + step
    index.check()
    expected = torch.stack([rows[columns].mean(0) for columns in members])
    assert (expected - at_first).abs().max() > 1
    torch.testing.assert_close(index.centroids, expected, atol=1e-5, rtol=0)
    assert torch.equal(first.centroids, at_first) and first.version == 3
    assert torch.equal(index.rows, first.rows) and torch.equal(index.medoids, first.medoids)
    assert index.shares == first.shares


def test_bfloat16_centroids_move_in_float32_and_round_once():
    """256 + 0.9 + 0.9 would stay 256 if every row were added in bfloat16, whose steps there are 2."""
    index = build([[0, 1], [2]], torch.tensor([[256.0], [1.0]]).bfloat16())
    old = torch.zeros(2, 1, dtype=torch.bfloat16)
    new = torch.tensor([[1.75], [1.75]], dtype=torch.bfloat16)
    moved = index.moved(torch.tensor([0, 0]), old, new)
    assert moved.centroids.dtype == torch.bfloat16
    assert moved.centroids.tolist() == [[258.0], [1.0]]


def test_nothing_moves_without_rows():
    index = build([[0, 1], [2]])
    moved = index.moved(torch.zeros(0, dtype=torch.int64), torch.zeros(0, WIDTH), torch.zeros(0, WIDTH))
    assert torch.equal(moved.centroids, index.centroids)
    assert moved.version == 4


@pytest.mark.parametrize(("old", "new"), [((2, WIDTH), (1, WIDTH)), ((1, WIDTH), (2, WIDTH)), ((2, 4), (2, WIDTH))])
def test_rows_that_do_not_fit_do_not_move(old: tuple[int, int], new: tuple[int, int]):
    with pytest.raises(ValueError, match=rf"must be \[2, {WIDTH}\]"):
        build([[0, 1], [2]]).moved(torch.tensor([0, 1]), torch.zeros(old), torch.zeros(new))


def test_an_index_is_never_changed():
    with pytest.raises(FrozenInstanceError):
        build([[0]]).version = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (2, 2)}, "2, 2"),
        ({"sizes": (3, 0), "counts": torch.tensor([3, 0])}, "3, 0"),
        ({"counts": torch.tensor([1, 2])}, "on the device"),
        ({"shares": (1, 2)}, "1, 2"),
        ({"shares": (3, -1)}, "3, -1"),
        ({"rows": torch.tensor([0, 4, 4])}, "distinct"),
        ({"rows": torch.tensor([-1, 4, 1])}, "negative"),
        ({"rows": torch.tensor([4, 0, 1])}, "cluster 0 ascend"),
        ({"medoids": torch.tensor([1, 1])}, "medoid 1 of cluster 0"),
        ({"medoids": torch.tensor([0])}, "one medoid"),
        ({"centroids": torch.zeros(3, WIDTH)}, "one centroid"),
        ({"centroids": torch.full((2, WIDTH), torch.nan)}, "finite"),
    ],
)
def test_the_check_sees(change: dict, message: str):
    index = build([[0, 4], [1]])
    index.check()
    with pytest.raises(AssertionError, match=message):
        replace(index, **change).check()
