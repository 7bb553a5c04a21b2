"""Books: where the members of some clusters stand side by side, and which of them a layer has from the one below."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from tiered.policies.polestar.fetching import Cluster
from tiered.policies.polestar.members import Members

Columns = Int[np.ndarray, "batch _"]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The members of some clusters of every sequence: cluster after cluster, behind `before` other rows, and filler
    behind sequences that have fewer. Rows are numbered where the sequences lie one after the other.

    Attributes:
        columns: of the canvas, of the other rows too; −1 at filler, and where a record holds what has left its cluster.
        slot: by row, which of its sequence's `clusters` it is of; −1 where `columns` is, and at the other rows.
        rows: numbers of the rows of each cluster.
        to, source: for each of what is `known` of the layer's input, numbers of these rows, here and there.
        blank: numbers of the rows of the clusters, and behind them, that `columns` is −1 at.
    """

    columns: Columns
    slot: Columns
    rows: dict[Cluster, slice]
    to: Sequence[Int[np.ndarray, " _"]]
    source: Sequence[Int[np.ndarray, " _"]]
    blank: Int[np.ndarray, " blank"]
    before: int

    @classmethod
    def of(
        cls,
        members: Sequence[Members],
        clusters: Sequence[Sequence[int]],
        known: Sequence[Columns],
        others: Columns | None = None,
    ) -> "Places":
        """`clusters[b]` of every sequence b, in this order.

        Args:
            known: columns whose rows need not be fetched, of one tensor each; −1 at rows that do not count.
            others: columns of what stands in front.
        """
        batch, before = len(members), 0 if others is None else others.shape[1]
        counts = [sum(one.sizes[cluster] for cluster in own) for one, own in zip(members, clusters, strict=True)]
        wide = before + max(counts)
        columns = np.full((batch, wide), -1, dtype=np.int64)
        if others is not None:
            columns[:, :before] = others
        slot = np.full_like(columns, -1)
        rows: dict[Cluster, slice] = {}
        for b, (one, own) in enumerate(zip(members, clusters, strict=True)):
            start = before
            for number, cluster in enumerate(own):
                stored = one.columns[one.slice_of(cluster)]
                counts_in, here = one.cluster_of[stored] == cluster, slice(start, start + len(stored))
                columns[b, here], slot[b, here] = np.where(counts_in, stored, -1), np.where(counts_in, number, -1)
                rows[b, cluster] = slice(b * wide + here.start, b * wide + here.stop)
                start = here.stop
        own, numbers = columns[:, before:], np.arange(batch * wide).reshape(batch, wide)[:, before:]
        to, source, missing = list[Int[np.ndarray, " _"]](), list[Int[np.ndarray, " _"]](), own >= 0
        for there in known:
            # Where each column of the canvas stands; the last entry is that of −1.
            place = np.full((batch, len(members[0].cluster_of) + 1), -1, dtype=np.int64)
            np.put_along_axis(place, there, np.arange(there.size).reshape(there.shape), axis=1)
            place[:, -1] = -1
            found = np.take_along_axis(place, own, axis=1)
            here = (found >= 0) & missing
            to.append(numbers[here])
            source.append(found[here])
            missing &= ~here
        return cls(columns, slot, rows, to, source, numbers[own < 0], before)


def by_column(columns: Columns, length: int) -> Bool[np.ndarray, "batch length"]:
    """True at `columns` of a canvas of `length`; −1 is none."""
    found = np.zeros((len(columns), length + 1), dtype=bool)
    np.put_along_axis(found, columns, True, axis=1)
    return found[:, :-1]
