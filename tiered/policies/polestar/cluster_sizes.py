"""Books: how many rows, clusters and records of hidden states a call of some sizes keeps, at most."""

from dataclasses import dataclass
from functools import cache

from tiered.clustering.allocation import MOST_ROWS_PER_CLUSTER, auto_clusters
from tiered.forward.sizes import CallSizes
from tiered.offload.codec_bytes import Codec, codec_bytes
from tiered.offload.slabs import UNIT, size_class
from tiered.policies.polestar.options import MOST_PARTS, PolestarOptions

# Of the largest record, and as many more as its last page has room for: 128 rows of LLaDA-8B are 295 KiB as
# nvfp4_delta. Larger ones move no faster, and an update that wants a part of one fetches it all.
RECORD_ROWS = 128
MOST_ROWS = 256  # where a page holds many


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSizes:
    """What decides how much hidden states take, beside the call's own sizes.

    Attributes:
        call: the call's sizes.
        codec: of the records, of up to `record_rows` rows.
        slot_bytes: of a staging slot that records arrive in.
        clusters: of a layer and sequence, `appended` of them come since the refresh.
        kept: rows in all clusters of a layer and sequence.
        renewed: those of the clusters that an update chooses, at most.
        group: layers that share their clusters.
        faiss: whether k-means goes through faiss.
    """

    call: CallSizes
    codec: Codec
    slot_bytes: int
    record_rows: int
    clusters: int
    appended: int
    kept: int
    renewed: int
    group: int
    faiss: bool = False

    @classmethod
    def of(cls, policy: PolestarOptions, call: CallSizes, least_slot: int) -> "ClusterSizes":
        """Of a call under `policy`. A staging slot has `least_slot` bytes at the least."""
        codec, block, shape = Codec(policy.codec), call.block_length, call.shape
        # Under a noise mask what is behind the block alone goes stale, and is clustered.
        clustered_in = call.answer if shape.noise_masked and call.answer is not None else call.context
        rows = max(0, clustered_in - block)
        if policy.window_blocks is not None:
            rows = min(rows, sum(policy.window_blocks) * block)
        if policy.clusters == "auto":  # large ones are cut
            wanted = auto_clusters(rows) + rows // MOST_ROWS_PER_CLUSTER
            renewed = min(rows, policy.top_m * MOST_ROWS_PER_CLUSTER)
        else:
            wanted, renewed = policy.clusters, rows
        clustered = min(max(wanted, 2), rows)
        appended = min(policy.appended_blocks, max(0, call.context // block - 1)) if clustered else 0
        kept = rows + appended * block
        rows_of_record = min(max(kept, 1), RECORD_ROWS)
        largest, half = (
            codec_bytes(codec, part, shape.width, element_bytes=call.element)
            for part in (rows_of_record, -(-rows_of_record // 2))
        )
        return cls(
            call=call,
            codec=codec,
            # Two records of the size that most have, in as much room as they take in the arena.
            slot_bytes=max(size_class(largest), 2 * size_class(half), least_slot),
            record_rows=fitting_rows(codec, shape.width, call.element, largest),
            clusters=clustered + appended,
            appended=appended,
            kept=kept,
            renewed=rows if policy.renew_response else renewed,
            group=policy.cluster_layers,
            faiss=policy.kmeans == "faiss",
        )

    @property
    def layers(self) -> int:
        """That keep records: one of a group, but for the first, whose rows are embeddings; the last is in none."""
        return -(-max(0, self.call.shape.layers - 2) // self.group)

    @property
    def scored(self) -> int:
        """Layers with clusters."""
        return self.layers + (self.call.shape.layers > 1)

    @property
    def records(self) -> int:
        """Of one layer of one sequence."""
        return min(self.kept, self.clusters + self.kept // self.record_rows)

    @property
    def parts(self) -> int:
        """Into which a reference cuts the attention, where it does."""
        return min(self.clusters - self.appended, MOST_PARTS) + 1 + bool(self.call.shape.sink_tokens)

    @property
    def with_parts(self) -> int:
        """Queries where a reference has parts: the clusters of a refresh, few enough, and those that came since."""
        return min(self.clusters, MOST_PARTS + self.appended)

    @property
    def block(self) -> int:
        """Columns whose keys a step changes: the block, and the row in front of it where that predicts its first
        token."""
        return self.call.block_length + self.call.shape.prediction_shift

    @property
    def active(self) -> int:
        """Rows that an update computes anyway."""
        return self.block + self.call.block_length * bool(self.appended)

    @property
    def flow(self) -> int:
        """Rows of a sequence that go from layer to layer in an update."""
        return self.active + self.renewed

    @property
    def row(self) -> int:
        """Bytes of one hidden row of every sequence."""
        return self.call.sequences * self.call.shape.width * self.call.element


def fitting_rows(codec: Codec | str, width: int, element_bytes: int, slot_bytes: int) -> int:
    """Rows of the largest record where a staging slot has `slot_bytes`, rounded up to whole pages; 0: none fits.

    A larger slot holds more records, not larger ones: how clusters are cut decides what rows decode to.
    """
    largest = codec_bytes(codec, RECORD_ROWS, width, element_bytes=element_bytes)
    return _rows_within(Codec(codec), width, element_bytes, -(-min(slot_bytes, largest) // UNIT) * UNIT)


@cache
def _rows_within(codec: Codec, width: int, element_bytes: int, nbytes: int) -> int:
    sizes = (codec_bytes(codec, rows, width, element_bytes=element_bytes) for rows in range(1, MOST_ROWS + 1))
    return sum(size <= nbytes for size in sizes)
