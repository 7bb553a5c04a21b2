"""Stored hidden states: the records of a layer of one sequence, and the fetches that bring clusters to the device."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tiered.clustering.allocation import Piece, pieces
from tiered.clustering.cluster_index import ClusterIndex
from tiered.core.features import Feature, Tier
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.kernels.host_values import on_device
from tiered.offload.codec_bytes import Codec
from tiered.policies.polestar.hidden_bytes import fitting_rows
from tiered.policies.polestar.members import Cluster
from tiered.tiers.banks import CentroidBank
from tiered.tiers.manager import TierManager
from tiered.tiers.record_book import RecordKey
from tiered.tiers.ticket import Ticket

Tickets = dict[tuple[Cluster, ...], Ticket]  # by the clusters that travel together


@dataclass(frozen=True, slots=True)
class HiddenRecords:
    """The hidden states of one layer of one sequence in a tier: one record for each cluster, or piece of a large one.

    Attributes:
        sizes: members of each cluster; the records hold their rows in cluster-major order.
        pieces: the rows of each record, by part number.
        most_rows: rows of a record, at most.
    """

    layer: int
    sequence: int
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    codec: Codec
    tier: Tier
    most_rows: int

    @classmethod
    def store(
        cls,
        tiers: TierManager,
        hidden: Float[Tensor, "length width"],
        index: ClusterIndex,
        *,
        layer: int,
        sequence: int = 0,
        codec: Codec | str = Codec.NVFP4_DELTA,
        tier: Tier = Tier.HOST,
    ) -> "HiddenRecords":
        """Store the members of every cluster of `index`; `hidden` holds the layer's input rows by canvas column. Raises
        as `TierManager.store`."""
        most = most_rows(tiers.slot_bytes, codec, hidden)
        records = cls(layer, sequence, index.sizes, pieces(index.sizes, most), Codec(codec), Tier(tier), most)
        records.renew(tiers, range(index.clusters), hidden[index.rows], index.centroids)
        return records

    def appended(self, count: int) -> "HiddenRecords":
        """One more cluster, of `count` members. None of them is stored yet."""
        cluster, first = len(self.sizes), sum(self.sizes)
        more = (Piece(cluster, first + piece.start, first + piece.stop) for piece in pieces([count], self.most_rows))
        return replace(self, sizes=(*self.sizes, count), pieces=(*self.pieces, *more))

    @spanned(Op.STORE)
    def renew(
        self,
        tiers: TierManager,
        clusters: Sequence[int],
        rows: Float[Tensor, "rows width"],
        centroids: Float[Tensor, "clusters width"],
    ) -> None:
        """Store all members of `clusters` anew: their `rows`, cluster after cluster, and against these `centroids`.
        Raises as `TierManager.store`."""
        parts = self._parts(clusters)
        tables: dict[int, CentroidBank] = {}
        try:
            if self.codec.needs_base:
                # One for each cluster: a shared one would stay until the last of its clusters is renewed.
                for cluster, centroid in zip(clusters, centroids.to(tiers.dtype), strict=True):
                    tables[cluster] = tiers.bank(centroid[None].clone())
            tiers.store(
                [self._key(part) for part in parts],
                rows,
                [self.pieces[part].stop - self.pieces[part].start for part in parts],
                codec=self.codec,
                bank=[tables[self.pieces[part].cluster] for part in parts] if tables else None,
                clusters=[0] * len(parts) if tables else None,
                tier=self.tier,
            )
        finally:
            for table in tables.values():
                table.release()

    def keys(self, clusters: Sequence[int]) -> list[RecordKey]:
        """The records of `clusters`, in their order."""
        return [self._key(part) for part in self._parts(clusters)]

    def forget(self, tiers: TierManager) -> None:
        tiers.forget(self._key(part) for part in range(len(self.pieces)))

    def _key(self, part: int) -> RecordKey:
        return RecordKey(Feature.HIDDEN, self.layer, self.sequence, part)

    def _parts(self, clusters: Sequence[int]) -> list[int]:
        of_cluster: dict[int, list[int]] = {cluster: [] for cluster in clusters}
        for part, piece in enumerate(self.pieces):
            if piece.cluster in of_cluster:
                of_cluster[piece.cluster].append(part)
        return [part for cluster in clusters for part in of_cluster[cluster]]


def most_rows(slot_bytes: int, codec: Codec | str, hidden: Float[Tensor, "length width"]) -> int:
    """Rows of the largest record of `codec` that fits a staging slot, at most `hidden_bytes.MOST_ROWS`. Raises
    `ValueError` if no row fits."""
    width, element = hidden.shape[1], hidden.element_size()
    fitting = fitting_rows(codec, width, element, slot_bytes)
    if not fitting:
        row = Codec(codec).row_bytes(width, element)
        raise ValueError(f"a row takes {row} bytes in {codec}; a staging slot has {slot_bytes}")
    return fitting


class Fetching:
    """The fetches of one update, and how many clusters came which way (`GroupUpdate`)."""

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._ahead: dict[Cluster, Ticket] = {}
        self._counts: Counter[str] = Counter()

    def guess(self, clusters: Sequence[Cluster], records: Sequence[HiddenRecords]) -> None:
        """Begin to fetch the clusters that the next `ask` will probably want."""
        self._ahead = {cluster: self._fetch([cluster], records) for cluster in clusters}

    def ask(self, clusters: Sequence[Cluster], records: Sequence[HiddenRecords]) -> Tickets:
        """The tickets of `clusters`: those of right guesses, and one for all others. Wrong guesses are given up."""
        guessed = {(cluster,): self._ahead.pop(cluster) for cluster in clusters if cluster in self._ahead}
        missing = [cluster for cluster in clusters if (cluster,) not in guessed]
        self._counts.update(ahead=len(guessed), on_demand=len(missing), in_vain=len(self._ahead))
        for ticket in self._ahead.values():
            ticket.close()
        self._ahead = {}
        return guessed | self._together(missing, records)

    def refetch(self, clusters: Sequence[Cluster], records: Sequence[HiddenRecords]) -> Tickets:
        """Begin to fetch clusters of which only some members were recomputed."""
        self._counts["repairs"] += len(clusters)
        return self._together(clusters, records)

    def take(self, tickets: Tickets, out: Float[Tensor, "any width"], rows: Mapping[Cluster, slice]) -> None:
        """Write the clusters of `tickets` to their `rows` of `out`. Compute waits for them; `tickets` is then empty."""
        for clusters, ticket in tickets.items():
            places = [rows[cluster] for cluster in clusters]
            if all(one.stop == other.start for one, other in pairwise(places)):
                ticket.into(out[places[0].start : places[-1].stop])
            else:
                numbers = np.concatenate([np.arange(place.start, place.stop) for place in places])
                ticket.into(out, on_device(torch.from_numpy(numbers), out.device))
        for clusters in [*tickets]:
            tickets.pop(clusters).wait()

    def counts(self) -> Counter[str]:
        """The counts since the last call of `counts`."""
        counts, self._counts = self._counts, Counter()
        return counts

    def _together(self, clusters: Sequence[Cluster], records: Sequence[HiddenRecords]) -> Tickets:
        return {tuple(clusters): self._fetch(clusters, records)} if clusters else {}

    def _fetch(self, clusters: Sequence[Cluster], records: Sequence[HiddenRecords]) -> Ticket:
        ticket = self._tiers.fetch([key for sequence, number in clusters for key in records[sequence].keys([number])])
        self._counts["fetched_bytes"] += ticket.nbytes
        return ticket
