"""Books: which columns of a sequence belong to which cluster, and where the rows of clusters stand. No tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from jaxtyping import Bool, Int

from tiered.tiers.record_bytes import StoredCluster

Cluster = tuple[int, int]  # a sequence, and the number of one of its clusters
Columns = Int[np.ndarray, "batch _"]


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The clusters of one sequence, in one layer or in several that share them.

    Attributes:
        columns: canvas columns in cluster-major order.
        sizes: members of each cluster.
        starts: the position of its first member in `columns`.
        cluster_of: the cluster of every column of the canvas; −1 if it is in none, or has left its cluster.
    """

    columns: Int[np.ndarray, " n"]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    cluster_of: Int[np.ndarray, " length"]

    @classmethod
    def of(cls, columns: Sequence[int], sizes: Sequence[int], length: int) -> "Members":
        """Clusters of these sizes over `columns`, on a canvas of `length` columns."""
        array = np.asarray(columns, dtype=np.int64)
        cluster_of = np.full(length, -1, dtype=np.int64)
        cluster_of[array] = np.repeat(np.arange(len(sizes)), sizes)
        return cls(array, tuple(sizes), tuple(accumulate(sizes, initial=0))[:-1], cluster_of)

    def slice_of(self, cluster: int) -> slice:
        """The positions of the members of `cluster` in `columns`."""
        return slice(self.starts[cluster], self.starts[cluster] + self.sizes[cluster])

    def stored(self, region: int, cluster: int) -> StoredCluster:
        """Where the rows of `cluster` are stored, in the region of this sequence."""
        return StoredCluster(region, cluster, self.slice_of(cluster))

    def live(self, cluster: int) -> Int[np.ndarray, " live"]:
        """The members that still belong to `cluster`; what is stored may be more."""
        columns = self.columns[self.slice_of(cluster)]
        return columns[self.cluster_of[columns] == cluster]

    def affected(self, recomputed: Bool[np.ndarray, " length"]) -> list[int]:
        """Clusters with a member in `recomputed`, ascending."""
        return [cluster for cluster in np.unique(self.cluster_of[recomputed]).tolist() if cluster >= 0]

    def covered(self, cluster: int, recomputed: Bool[np.ndarray, " length"]) -> bool:
        """Whether every member of `cluster` is in `recomputed`."""
        return bool(recomputed[self.live(cluster)].all())

    def mostly(self, recomputed: Bool[np.ndarray, " length"]) -> list[int]:
        """Clusters with half or more of their members in `recomputed`, ascending."""
        own, clusters = self.cluster_of + 1, len(self.sizes)
        every, some = (np.bincount(own, counts, clusters + 1)[1:] for counts in (None, recomputed))
        return np.flatnonzero((some > 0) & (2 * some >= every)).tolist()

    def without(self, first: int, stop: int) -> "Members":
        """The same clusters; columns `first` to `stop` leave their clusters."""
        cluster_of = self.cluster_of.copy()
        cluster_of[first:stop] = -1
        return replace(self, cluster_of=cluster_of)

    def appended(self, first: int, stop: int) -> "Members":
        """One more cluster, of columns `first` to `stop`, which belong to no cluster."""
        span = np.arange(first, stop)
        cluster_of = self.cluster_of.copy()
        cluster_of[span] = len(self.sizes)
        sizes, starts = (*self.sizes, len(span)), (*self.starts, len(self.columns))
        return Members(np.concatenate([self.columns, span]), sizes, starts, cluster_of)


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """Where the rows of some clusters stand in one tensor. Every sequence has `before` other rows, its clusters one
    after the other, and filler if another sequence has more rows. A row's number counts over all sequences.

    Attributes:
        columns: canvas column of every row; −1 at filler, and at stored rows that have left their cluster.
        cluster: which of the sequence's listed clusters a row is of; −1 if its column is, and at the other rows.
        rows: numbers of the rows of each cluster.
        numbers: for each tensor of known rows, the numbers of these rows here, and then those in that tensor.
        blank: numbers of the rows behind `before` that have no column.
        before: other rows in front of the clusters' rows.
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
    ) -> "RowLayout":
        """Lay out `clusters[b]` of every sequence b, in this order.

        Args:
            known: canvas columns of each tensor of known rows; −1 at rows that do not count.
            before: rows in front, the first ones of the first of these tensors.
        """
        counts = [sum(one.sizes[cluster] for cluster in own) for one, own in zip(members, clusters, strict=True)]
        batch, wide = len(members), before + max(counts)
        columns = np.full((batch, wide), -1, dtype=np.int64)
        columns[:, :before] = known[0][:, :before]
        cluster_of_row, rows = np.full_like(columns, -1), dict[Cluster, slice]()
        for b, (one, own) in enumerate(zip(members, clusters, strict=True)):
            start = before
            for number, cluster in enumerate(own):
                stored = one.columns[one.slice_of(cluster)]
                live, here = one.cluster_of[stored] == cluster, slice(start, start + len(stored))
                columns[b, here], cluster_of_row[b, here] = np.where(live, stored, -1), np.where(live, number, -1)
                rows[b, cluster] = slice(b * wide + here.start, b * wide + here.stop)
                start = here.stop
        own, here = columns[:, before:], np.arange(batch * wide).reshape(batch, wide)[:, before:]
        numbers, missing = list[Int[np.ndarray, " _"]](), own >= 0
        for there in known:
            # The number of every canvas column; the last entry is that of column −1.
            place = np.full((batch, len(members[0].cluster_of) + 1), -1, dtype=np.int64)
            np.put_along_axis(place, there, np.arange(there.size).reshape(there.shape), axis=1)
            place[:, -1] = -1
            found = np.take_along_axis(place, own, axis=1)
            known_here = (found >= 0) & missing
            numbers += [here[known_here], found[known_here]]
            missing &= ~known_here
        return cls(columns, cluster_of_row, rows, numbers, here[own < 0], before)


def by_column(columns: Columns, length: int) -> Bool[np.ndarray, "batch length"]:
    """True at `columns` of a canvas of `length`; −1 is no column."""
    found = np.zeros((len(columns), length + 1), dtype=bool)
    np.put_along_axis(found, columns, True, axis=1)
    return found[:, :-1]
