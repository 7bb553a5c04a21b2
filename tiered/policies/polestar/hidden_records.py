"""The hidden states of one layer of one sequence as records: one for each cluster, or piece of a large one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from tiered.clustering.allocation import Piece, pieces
from tiered.clustering.cluster_index import ClusterIndex
from tiered.core.features import Feature, Tier
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.offload.codec_bytes import Codec, codec_bytes
from tiered.policies.polestar.cluster_sizes import fitting_rows
from tiered.tiers.banks import CentroidBank
from tiered.tiers.manager import TierManager
from tiered.tiers.record_book import RecordKey


@dataclass(frozen=True, slots=True)
class HiddenRecords:
    """What `store` left in the tiers, by cluster.

    Attributes:
        layer, sequence: whose hidden states.
        sizes: members of each cluster; the records hold their rows in cluster-major order.
        pieces: the record of each part number.
        codec, tier: how and where they are stored.
        most_rows: of a record.
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
        """Store the members of every cluster of `index`; `hidden` holds the layer's input rows by canvas column.

        Raises:
            TierCapacityError, ValueError: see `TierManager.store`.
        """
        most = most_rows(tiers.slot_bytes, codec, hidden)
        records = cls(layer, sequence, index.sizes, pieces(index.sizes, most), Codec(codec), Tier(tier), most)
        records.renew(tiers, range(index.clusters), hidden[index.rows], index.centroids)
        return records

    def appended(self, count: int) -> "HiddenRecords":
        """With one more cluster, of `count` members. Nothing of it is stored yet."""
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

        Raises:
            TierCapacityError, ValueError: see `TierManager.store`.
        """
        parts = self._parts(clusters)
        banks: dict[int, CentroidBank] = {}
        try:
            if self.codec.needs_base:
                # One for each cluster: a shared one would stay until the last of its clusters is renewed.
                for cluster, centroid in zip(clusters, centroids.to(tiers.dtype), strict=True):
                    banks[cluster] = tiers.bank(centroid[None].clone())
            tiers.store(
                [self.key(part) for part in parts],
                rows,
                [self.pieces[part].stop - self.pieces[part].start for part in parts],
                codec=self.codec,
                bank=[banks[self.pieces[part].cluster] for part in parts] if banks else None,
                clusters=[0] * len(parts) if banks else None,
                tier=self.tier,
            )
        finally:
            for bank in banks.values():
                bank.release()

    def key(self, part: int) -> RecordKey:
        """The name of a piece's record."""
        return RecordKey(Feature.HIDDEN, self.layer, self.sequence, part)

    def keys(self, clusters: Sequence[int]) -> list[RecordKey]:
        """The records of `clusters`, in their order."""
        return [self.key(part) for part in self._parts(clusters)]

    def forget(self, tiers: TierManager) -> None:
        """Drop all records."""
        tiers.forget(self.key(part) for part in range(len(self.pieces)))

    def _parts(self, clusters: Sequence[int]) -> list[int]:
        of_cluster: dict[int, list[int]] = {cluster: [] for cluster in clusters}
        for part, piece in enumerate(self.pieces):
            if piece.cluster in of_cluster:
                of_cluster[piece.cluster].append(part)
        return [part for cluster in clusters for part in of_cluster[cluster]]


def most_rows(slot_bytes: int, codec: Codec | str, hidden: Float[Tensor, "length width"]) -> int:
    """Rows of the largest record of `codec` that fits a staging slot, at most `cluster_sizes.MOST_ROWS`.

    Raises:
        ValueError: not even one row fits.
    """
    width, element = hidden.shape[1], hidden.element_size()
    fitting = fitting_rows(codec, width, element, slot_bytes)
    if not fitting:
        row = codec_bytes(codec, 1, width, element_bytes=element)
        raise ValueError(f"a row takes {row} bytes in {codec}; a staging slot has {slot_bytes}")
    return fitting
