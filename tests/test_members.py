"""Members of clusters: the host's books against plain Python."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered.policies.polestar.members import Members

Clusters = list[list[int]]


@st.composite
def clusters_of(draw: st.DrawFn) -> tuple[int, Clusters]:
    """The length of a canvas, and clusters over some of its columns, none of them empty."""
    length = draw(st.integers(1, 30))
    columns = draw(st.permutations(range(length)))[: draw(st.integers(0, length))]
    cuts = draw(st.sets(st.integers(1, max(1, len(columns) - 1)))) if len(columns) > 1 else set()
    return length, [
        columns[first:stop] for first, stop in pairwise([0, *sorted(cuts), len(columns)])
    ] if columns else []


def books(length: int, clusters: Clusters) -> Members:
    return Members.of([column for columns in clusters for column in columns], [*map(len, clusters)], length)


def check(members: Members, stored: Clusters, belongs: dict[int, int], recomputed: set[int]) -> None:
    """`stored` are the columns of each cluster's record, `belongs` the cluster of every column that has one."""
    assert members.columns.tolist() == [column for columns in stored for column in columns]
    assert members.sizes == tuple(map(len, stored))
    assert {column: cluster for column, cluster in enumerate(members.cluster_of.tolist()) if cluster >= 0} == belongs
    assert members.cluster_of.min() >= -1
    marked = np.isin(np.arange(len(members.cluster_of)), list(recomputed))
    assert members.affected(marked) == sorted({belongs[column] for column in recomputed if column in belongs})
    assert [members.columns[members.slice_of(cluster)].tolist() for cluster in range(len(stored))] == stored
    outside = {cluster for column, cluster in belongs.items() if column not in recomputed}
    assert members.uncovered(marked).tolist() == [cluster in outside for cluster in range(len(stored))]


@given(clusters_of(), st.data())
def test_members_against_lists(case: tuple[int, Clusters], data: st.DataObject):
    length, stored = case
    members = books(length, stored)
    belongs = {column: cluster for cluster, columns in enumerate(stored) for column in columns}

    def recomputed() -> set[int]:
        return data.draw(st.sets(st.integers(0, length - 1)))

    check(members, stored, belongs, recomputed())
    for _ in range(data.draw(st.integers(0, 3))):  # a block begins: its columns leave, and the last one's come back
        first, stop = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        before, copy = members, members.cluster_of.copy()
        members = members.without(first, stop)
        belongs = {column: cluster for column, cluster in belongs.items() if not first <= column < stop}
        check(members, stored, belongs, recomputed())
        assert (before.cluster_of == copy).all()  # an earlier version stays as it was
        if first < stop:
            members = members.appended(first, stop)
            stored = [*stored, [*range(first, stop)]]
            belongs |= dict.fromkeys(range(first, stop), len(stored) - 1)
            check(members, stored, belongs, recomputed())


def test_a_cluster_whose_members_have_all_left():
    members = books(6, [[1, 2], [4]]).without(0, 3)
    assert members.sizes == (2, 1) and members.affected(np.ones(6, dtype=bool)) == [1]
    assert members.uncovered(np.zeros(6, dtype=bool)).tolist() == [False, True]
