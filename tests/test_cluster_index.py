"""The index of clusters: look-ups against plain lists."""

from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from cluster_checks import check_index
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
        columns=[column for cluster in members for column in cluster],
        sizes=sizes,
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
    check_index(index)
    assert index.clusters == len(members)
    expected = [-1] * length
    for cluster, columns in enumerate(members):
        for column in columns:
            expected[column] = cluster
    assert index.cluster_of(length).tolist() == expected


def test_an_index_is_never_changed():
    with pytest.raises(FrozenInstanceError):
        build([[0]]).sizes = (2,)  # pyright: ignore[reportAttributeAccessIssue]
