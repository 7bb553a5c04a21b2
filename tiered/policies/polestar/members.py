"""Books: which columns of a sequence belong to which cluster, on the host. Integers only, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The clusters of one sequence, in one layer or in several that share them.

    Attributes:
        columns: canvas columns in cluster-major order.
        sizes: members of each cluster.
        cluster_of: the cluster of every column of the canvas, −1 where there is none (any more).
    """

    columns: Int[np.ndarray, " n"]
    sizes: tuple[int, ...]
    cluster_of: Int[np.ndarray, " length"]

    @classmethod
    def of(cls, columns: Sequence[int], sizes: Sequence[int], length: int) -> "Members":
        """Clusters of these sizes over `columns`, on a canvas of `length` columns."""
        array = np.asarray(columns, dtype=np.int64)
        cluster_of = np.full(length, -1, dtype=np.int64)
        cluster_of[array] = np.repeat(np.arange(len(sizes)), sizes)
        return cls(array, tuple(sizes), cluster_of)

    def slice_of(self, cluster: int) -> slice:
        """Where the members of `cluster` stand in the cluster-major order."""
        start = sum(self.sizes[:cluster])
        return slice(start, start + self.sizes[cluster])

    def live(self, cluster: int) -> Int[np.ndarray, " live"]:
        """The members that still belong to `cluster`: its records may hold more."""
        columns = self.columns[self.slice_of(cluster)]
        return columns[self.cluster_of[columns] == cluster]

    def touched(self, fresh: Bool[np.ndarray, " length"]) -> list[int]:
        """Clusters with a member in `fresh`, ascending."""
        return [cluster for cluster in np.unique(self.cluster_of[fresh]).tolist() if cluster >= 0]

    def covered(self, cluster: int, fresh: Bool[np.ndarray, " length"]) -> bool:
        """Whether every member of `cluster` is in `fresh`."""
        return bool(fresh[self.live(cluster)].all())

    def mostly(self, fresh: Bool[np.ndarray, " length"]) -> list[int]:
        """Clusters half or more of whose members are in `fresh`, ascending."""
        clustered = self.cluster_of >= 0
        every, some = (
            np.bincount(self.cluster_of[columns], minlength=len(self.sizes))
            for columns in (clustered, clustered & fresh)
        )
        return np.flatnonzero((some > 0) & (2 * some >= every)).tolist()

    def without(self, first: int, stop: int) -> "Members":
        """The same records, of which columns `first` to `stop` belong to no cluster any more."""
        cluster_of = self.cluster_of.copy()
        cluster_of[first:stop] = -1
        return replace(self, cluster_of=cluster_of)

    def appended(self, first: int, stop: int) -> "Members":
        """With one more cluster: columns `first` to `stop`, which belong to none."""
        span = np.arange(first, stop)
        cluster_of = self.cluster_of.copy()
        cluster_of[span] = len(self.sizes)
        return Members(np.concatenate([self.columns, span]), (*self.sizes, len(span)), cluster_of)
