"""Books: what a call that keeps hidden states in the tiers takes of each, beside what every call takes."""

from dataclasses import dataclass
from functools import cache

from tiered.clustering.allocation import MOST_ROWS_PER_CLUSTER, auto_clusters
from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.forward.costs import part_bytes
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.offload.codec_bytes import Codec, centroid_bytes, codec_bytes
from tiered.offload.slabs import UNIT
from tiered.policies.polestar.options import MOST_PARTS, HiddenOptions
from tiered.policies.polestar.update_costs import UpdateSizes, refresh_bytes, update_bytes
from tiered.tiers.host_costs import DISK_HEADER, below_device, rings_bytes
from tiered.tiers.slab_costs import arena_bytes

# Rows that a staging slot holds: 128 rows of LLaDA-8B are 295 KiB as nvfp4_delta, enough for a link's full speed.
RECORD_ROWS = 128
STORE_SLOTS = 2  # one is encoded into while the other is copied
MOST_FETCH_SLOTS = 16
MOST_ROWS = 256  # of a record, where a slot holds so many
_FLOAT32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCosts:
    """Bytes of the hidden states of one call. Which clusters there are is known only once rows are clustered, so all of
    it is what the call takes at most.

    Attributes:
        options: what is kept.
        layers: that keep records: all but the first, whose rows are embeddings, and the last, which feeds none.
        clusters: of one layer of one sequence.
        records: bytes of all records, in whichever tier keeps them.
        arena: bytes of the memory that they lie in, the padding of their slots included.
        file: the same in the disk tier.
        references: bytes on the device of what drift is measured with, and of the clusters' columns.
        banks: bytes on the device of the centroids that deltas are taken against.
        slot_bytes, fetch_slots, store_slots: of the rings on the device.
        activations: bytes on the device that a pass takes beside those of every call: where a few clusters may
            hold all rows, an update goes over all of them.
    """

    options: HiddenOptions
    layers: int
    clusters: int
    records: int
    arena: int
    file: int
    references: int
    banks: int
    slot_bytes: int
    fetch_slots: int
    store_slots: int
    activations: int

    @classmethod
    def of(
        cls,
        options: HiddenOptions,
        shape: ModelShape,
        *,
        batch: int,
        context: int,
        block_length: int,
        dtype: str,
        answer: int | None = None,
        least_slot: int = 0,
    ) -> "TierCosts":
        """Of `batch` sequences (with guidance, twice those asked for) over `context` positions, of which `answer` are
        behind the prompt (None: any number). A staging slot has `least_slot` bytes at the least, where others use the
        rings as well."""
        element, codec = BYTES_PER_ELEMENT[dtype], options.codec
        # Under a noise mask what is behind the block alone goes stale, and is clustered.
        clustered_in = answer if shape.noise_masked and answer is not None else context
        rows = max(0, clustered_in - block_length)
        if options.window_blocks is not None:
            rows = min(rows, sum(options.window_blocks) * block_length)
        if options.clusters == "auto":  # large ones are cut
            wanted = auto_clusters(rows) + rows // MOST_ROWS_PER_CLUSTER
            renewed = min(rows, options.top_m * MOST_ROWS_PER_CLUSTER)
        else:
            wanted, renewed = options.clusters, rows
        if options.renew_response:
            renewed = rows
        clustered = min(max(wanted, 2), rows)
        appended = min(options.appended_blocks, max(0, context // block_length - 1)) if clustered else 0
        layers, scored = max(0, shape.layers - 2), max(0, shape.layers - 1)
        kept, clusters = rows + appended * block_length, clustered + appended
        slot = codec_bytes(codec, min(max(kept, 1), RECORD_ROWS), shape.width, element_bytes=element)
        slot_bytes = max(-(-slot // UNIT) * UNIT, least_slot)
        most = _most_rows(codec, shape.width, element, slot_bytes)
        records = min(kept, clusters + kept // most)
        nbytes = 0
        if kept:
            nbytes = codec_bytes(codec, kept, shape.width, element_bytes=element, records=records)
        of_arena = {
            "rows": batch * layers * kept, "records": batch * layers * records, "most_rows": most,
            "width": shape.width, "element_bytes": element,
        }  # fmt: skip
        bank = centroid_bytes(clusters, shape.width, element_bytes=element) * (codec is Codec.NVFP4_DELTA)
        # The block, and the row in front of it where that predicts the block's first token.
        tracked = block_length + shape.prediction_shift
        parts = min(clustered, MOST_PARTS) + 1 + bool(shape.sink_tokens)
        sizes = UpdateSizes(
            shape=shape, batch=batch, context=context, dtype=dtype, codec=codec, scored=scored, clusters=clusters,
            appended=appended, parts=parts, kept=kept, renewed=renewed, block=tracked,
            active=tracked + block_length * bool(appended), record_rows=most,
        )  # fmt: skip
        # What every call books for a refresh without clusters.
        room = batch * context * shape.width * element + part_bytes(shape, batch=batch, context=context, dtype=dtype)
        fetched = min(MOST_FETCH_SLOTS, batch * min(options.top_m, max(1, clusters)) + 2)
        return cls(
            options=options,
            layers=layers,
            clusters=clusters,
            records=batch * layers * nbytes,
            arena=arena_bytes(codec, **of_arena, slab_bytes=slot_bytes),
            file=arena_bytes(codec, **of_arena, slab_bytes=slot_bytes + UNIT, header=DISK_HEADER),
            references=batch * scored * _reference_bytes(sizes, appended=bool(appended)),
            banks=(batch * layers + 1) * bank if layers else 0,  # new ones of a layer stand beside those they replace
            slot_bytes=slot_bytes,
            fetch_slots=fetched if options.tier is Tier.HOST else 1,
            store_slots=STORE_SLOTS if options.tier is Tier.HOST else 1,
            activations=max(refresh_bytes(sizes) - room, update_bytes(sizes) - room, 0) if kept else 0,
        )

    @property
    def staging(self) -> int:
        """Bytes of the rings on the device."""
        return self.slot_bytes * (self.fetch_slots + self.store_slots)

    def tiers(self, budget: MemoryBudget) -> dict[Tier, dict[Account, int]]:
        """Bytes of every tier by account, beside what every call takes.

        See `below_device` for what goes to disk.
        """
        device = {
            Account.CENTROIDS: self.references + self.banks,
            Account.STAGING: self.staging,
            Account.ACTIVATIONS: self.activations,
        }
        if self.options.tier is Tier.DEVICE:
            held = {Account.HIDDEN: self.records, Account.SPARE: self.arena - self.records}
            return {Tier.DEVICE: device | held, **rings_bytes(budget, self.slot_bytes)}
        records = {Account.HIDDEN: self.records}
        below = below_device(budget, records, arena=self.arena, file=self.file, slot_bytes=self.slot_bytes)
        return {Tier.DEVICE: device, **below}


@cache
def _most_rows(codec: Codec, width: int, element_bytes: int, slot_bytes: int) -> int:
    """Rows of the largest record that fits a slot (`tiered.policies.polestar.hidden_records.most_rows`)."""
    sizes = (codec_bytes(codec, rows, width, element_bytes=element_bytes) for rows in range(1, MOST_ROWS + 1))
    return sum(size <= slot_bytes for size in sizes)


def _reference_bytes(sizes: UpdateSizes, *, appended: bool) -> int:
    """What one layer of one sequence keeps from update to update (`tiered.policies.polestar.layer_state`)."""
    shape, clusters = sizes.shape, sizes.clusters
    element = BYTES_PER_ELEMENT[sizes.dtype]
    queries = clusters * shape.heads * shape.head_dim * element
    # Scores of the block's columns; peak and mass of the rest, part by part and in all.
    attention = (
        _FLOAT32
        * shape.heads
        * max(clusters * (sizes.block + 4), sizes.with_parts * (sizes.block + 2 * sizes.parts + 2))
    )
    columns = _INT64 * (2 * sizes.context + sizes.block + sizes.parts)
    members = (_INT64 * (2 if appended else 1) + 1) * sizes.kept + (2 * _INT64 + 1) * clusters
    return queries + attention + columns + members
