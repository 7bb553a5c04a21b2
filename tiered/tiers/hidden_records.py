"""The hidden states of one layer of one sequence as records: one for each cluster, or piece of a large one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.clustering.cluster_index import ClusterIndex
from tiered.clustering.pieces import Piece, pieces
from tiered.features import Feature, Tier
from tiered.offload.codec_bytes import Codec, codec_bytes
from tiered.offload.slabs import UNIT
from tiered.tiers.manager import TierManager
from tiered.tiers.record import RecordKey
from tiered.tiers.ticket import Ticket

MOST_ROWS = 256  # of a record: larger ones move no faster, and an update that wants a part of one fetches it all


@dataclass(frozen=True, slots=True)
class HiddenRecords:
    """What `store` left in the tiers, and how to get it back by cluster.

    Attributes:
        layer, sequence: whose hidden states.
        index: the clusters, with the centroids that deltas were taken against.
        pieces: the record of each part number.
    """

    layer: int
    sequence: int
    index: ClusterIndex
    pieces: tuple[Piece, ...]

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
        """Store the members of every cluster of `index`; `hidden` holds the layer's input rows by canvas column.

        Raises:
            TierCapacityError, ValueError: see `TierManager.store`.
        """
        parts = pieces(index.sizes, most_rows(tiers.slot_bytes, codec, hidden))
        records = cls(layer, sequence, index, parts)
        delta = codec == Codec.NVFP4_DELTA
        bank = tiers.bank(index.centroids.to(tiers.dtype), index.version) if delta else None
        try:
            tiers.store(
                [records.key(part) for part in range(len(parts))],
                hidden[index.rows],
                [piece.stop - piece.start for piece in parts],
                codec=codec,
                bank=bank,
                clusters=[piece.cluster for piece in parts] if delta else None,
                tier=tier,
            )
        finally:
            if bank is not None:
                bank.release()
        return records

    def key(self, part: int) -> RecordKey:
        """The name of a piece's record."""
        return RecordKey(Feature.HIDDEN, self.layer, self.sequence, part)

    def keys(self, clusters: Sequence[int]) -> list[RecordKey]:
        """The records of `clusters`, in their order."""
        of_cluster: dict[int, list[int]] = {cluster: [] for cluster in clusters}
        for part, piece in enumerate(self.pieces):
            if piece.cluster in of_cluster:
                of_cluster[piece.cluster].append(part)
        return [self.key(part) for cluster in clusters for part in of_cluster[cluster]]

    def fetch(self, tiers: TierManager, clusters: Sequence[int]) -> tuple[Ticket, Int[Tensor, " rows"]]:
        """Begin to fetch the members of `clusters`; with the ticket come the canvas columns of its rows.

        Raises:
            KeyError, RecordLostError: see `TierManager.fetch`.
            ValueError: no clusters, or one that is not there.
        """
        columns = [self.index.members(cluster) for cluster in clusters]
        ticket = tiers.fetch(self.keys(clusters))
        return ticket, torch.cat(columns)


def most_rows(slot_bytes: int, codec: Codec | str, hidden: Float[Tensor, "length width"]) -> int:
    """Rows of the largest record of `codec` that fits a staging slot, at most 256.

    Raises:
        ValueError: not even one row fits.
    """
    sizes = [
        codec_bytes(codec, rows, hidden.shape[1], element_bytes=hidden.element_size())
        for rows in range(1, MOST_ROWS + 1)
    ]
    fitting = sum(size <= slot_bytes // UNIT * UNIT for size in sizes)
    if not fitting:
        raise ValueError(f"a row takes {sizes[0]} bytes in {codec}; a staging slot has {slot_bytes}")
    return fitting
