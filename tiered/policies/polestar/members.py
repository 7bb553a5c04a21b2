"""Books: the cluster of each column of a sequence, and the places of clusters' rows. No tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Bool, Int

from tiered.tiers.record_bytes import StoredCluster

Cluster = tuple[int, int]  # number of a sequence, and number of one of its clusters
Columns = Int[np.ndarray, "batch _"]


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The clusters of one sequence, in one layer or in several that share them.

    Attributes:
        columns: canvas columns in cluster-major order.
        sizes: number of members of each cluster.
        starts: position of each cluster's first member in `columns`.
        cluster_of: cluster of every canvas column; −1 if it is in none or was removed.
    """

    columns: Int[np.ndarray, " n"]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    cluster_of: Int[np.ndarray, " length"]

    @classmethod
    def of(cls, columns: Sequence[int], sizes: Sequence[int], length: int) -> "Members":
        """Clusters of these sizes over `columns`, on a canvas of length `length`."""
        array = np.asarray(columns, dtype=np.int64)
        cluster_of = np.full(length, -1, dtype=np.int64)
        cluster_of[array] = np.repeat(np.arange(len(sizes)), sizes)
        return cls(array, tuple(sizes), tuple(accumulate(sizes, initial=0))[:-1], cluster_of)

    def slice_of(self, cluster: int) -> slice:
        """Positions of the members of `cluster` in `columns`."""
        return slice(self.starts[cluster], self.starts[cluster] + self.sizes[cluster])

    def stored(self, region: int, cluster: int) -> StoredCluster:
        """Stored place of the rows of `cluster`, in the region of this sequence."""
        return StoredCluster(region, cluster, self.slice_of(cluster))

    def affected(self, recomputed: Bool[np.ndarray, " length"]) -> list[int]:
        """Clusters with a member in `recomputed`, ascending."""
        return [cluster for cluster in np.unique(self.cluster_of[recomputed]).tolist() if cluster >= 0]

    def uncovered(self, recomputed: Bool[np.ndarray, " length"]) -> Bool[np.ndarray, " clusters"]:
        """True at clusters with a member outside `recomputed`."""
        found = np.zeros(len(self.sizes) + 1, dtype=bool)
        found[self.cluster_of[~recomputed]] = True  # the last entry is for columns in no cluster
        return found[:-1]

    def mostly(self, recomputed: Bool[np.ndarray, " length"]) -> list[int]:
        """Clusters with half or more of their members in `recomputed`, ascending."""
        own, clusters = self.cluster_of + 1, len(self.sizes)
        every, some = (np.bincount(own, counts, clusters + 1)[1:] for counts in (None, recomputed))
        return np.flatnonzero((some > 0) & (2 * some >= every)).tolist()

    def without(self, first: int, stop: int) -> "Members":
        """The same clusters without columns `first` to `stop`."""
        cluster_of = self.cluster_of.copy()
        cluster_of[first:stop] = -1
        return replace(self, cluster_of=cluster_of)

    def appended(self, first: int, stop: int) -> "Members":
        """With one more cluster, of columns `first` to `stop`, which belong to no cluster."""
        span = np.arange(first, stop)
        cluster_of = self.cluster_of.copy()
        cluster_of[span] = len(self.sizes)
        sizes, starts = (*self.sizes, len(span)), (*self.starts, len(self.columns))
        return Members(np.concatenate([self.columns, span]), sizes, starts, cluster_of)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredRows:
    """The layout of some clusters' rows in one tensor. Every sequence has `before` other rows, then its clusters in
    order, then filler up to the longest sequence. Row numbers count over all sequences.

    Attributes:
        columns: canvas column of every row; −1 for filler, and for stored rows removed from their cluster.
        cluster: index of a row's cluster among the sequence's listed ones; −1 for rows without a column and the first
            `before`.
        rows: row numbers of each cluster.
        numbers: for each tensor of known rows, the row numbers here, followed by those in that tensor.
        blank: row numbers after the first `before` without a column.
        before: number of other rows before the clusters' rows.
    """

    columns: Columns
    cluster: Columns
    rows: dict[Cluster, slice]
    numbers: Sequence[Int[np.ndarray, " _"]]
    blank: Int[np.ndarray, " blank"]
    before: int

    @classmethod
    def of(
        cls, members: Sequence[Members], clusters: Sequence[Sequence[int]], known: Sequence[Columns], before: int = 0
    ) -> "GatheredRows":
        """Lay out `clusters[b]` of every sequence b, in this order.

        Args:
            known: canvas columns of each tensor of known rows; −1 at invalid rows.
            before: number of other rows, the first ones of the first of these tensors.
        """
        sizes = [[one.sizes[cluster] for cluster in own] for one, own in zip(members, clusters, strict=True)]
        batch, wide = len(members), before + max(map(sum, sizes))
        columns = np.full((batch, wide), -1, dtype=np.int64)
        columns[:, :before] = known[0][:, :before]
        cluster_of_row, rows = np.full_like(columns, -1), dict[Cluster, slice]()
        for b, (one, own, counts) in enumerate(zip(members, clusters, sizes, strict=True)):
            stored = np.concatenate([columns[b, :0], *(one.columns[one.slice_of(cluster)] for cluster in own)])
            number, here = np.repeat(np.arange(len(own)), counts), slice(before, before + len(stored))
            live = one.cluster_of[stored] == np.repeat(own, counts)  # a removed row's cluster is −1
            columns[b, here], cluster_of_row[b, here] = np.where(live, stored, -1), np.where(live, number, -1)
            edges = pairwise(accumulate(counts, initial=b * wide + before))
            rows |= {(b, cluster): slice(*edge) for cluster, edge in zip(own, edges, strict=True)}
        own, here = columns[:, before:], np.arange(batch * wide).reshape(batch, wide)[:, before:]
        numbers, missing = list[Int[np.ndarray, " _"]](), own >= 0
        for there in known:
            # Row number of every canvas column; the last entry is for column −1.
            place = np.full((batch, len(members[0].cluster_of) + 1), -1, dtype=np.int64)
            np.put_along_axis(place, there, np.arange(there.size).reshape(there.shape), axis=1)
            place[:, -1] = -1
            found = np.take_along_axis(place, own, axis=1)
            known_here = (found >= 0) & missing
            numbers += [here[known_here], found[known_here]]
            missing &= ~known_here
        return cls(columns, cluster_of_row, rows, numbers, here[own < 0], before)


def by_column(columns: Columns, length: int) -> Bool[np.ndarray, "batch length"]:
    """True at `columns` of a canvas of length `length`; −1 for no column."""
    found = np.zeros((len(columns), length + 1), dtype=bool)
    np.put_along_axis(found, columns, True, axis=1)
    return found[:, :-1]
