"""The index of clusters: look-ups against plain lists, and what its check sees."""

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


def build(members: list[list[int]]) -> ClusterIndex:
    """An index of clusters with these columns; medoids are the last ones."""
    sizes = tuple(map(len, members))
    return ClusterIndex(
        rows=torch.tensor([column for cluster in members for column in cluster], dtype=torch.int64),
        sizes=sizes,
        counts=torch.tensor(sizes, dtype=torch.int64),
        shares=(len(members), 0),
        centroids=random(len(members), WIDTH),
        medoids=torch.tensor([cluster[-1] for cluster in members], dtype=torch.int64),
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
    expected = [-1] * length
    for cluster, columns in enumerate(members):
        for column in columns:
            expected[column] = cluster
    assert index.cluster_of(length).tolist() == expected


def test_an_index_is_never_changed():
    with pytest.raises(FrozenInstanceError):
        build([[0]]).sizes = (2,)  # pyright: ignore[reportAttributeAccessIssue]


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
