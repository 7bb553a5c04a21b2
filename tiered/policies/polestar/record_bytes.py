"""Books: what the hidden states of a call take of each tier, beside what every call takes."""

from tiered.core.features import Tier
from tiered.forward.forward_bytes import part_bytes
from tiered.forward.sizes import CallSizes
from tiered.offload.codec_bytes import centroid_bytes, codec_bytes
from tiered.offload.slabs import UNIT
from tiered.offload.spill_record import HEADER_BYTES
from tiered.policies.polestar.cluster_sizes import ClusterSizes
from tiered.policies.polestar.options import PolestarOptions
from tiered.policies.polestar.update_bytes import refresh_bytes, update_bytes
from tiered.tiers.arena_bytes import arena_bytes, best_slab
from tiered.tiers.record_bytes import RecordBytes

STORE_SLOTS = 2  # one is encoded into while the other is copied
STORE_BYTES = 2 << 20  # of one, at most: a copy is at full speed, and what it costs beside its bytes is little
MOST_FETCH_SLOTS = 16
_FLOAT32, _INT64 = 4, 8


def hidden_record_bytes(policy: PolestarOptions, call: CallSizes, least_slot: int = 0) -> RecordBytes:
    """Of a call under `policy`. Staging slots and slabs have `least_slot` bytes at the least, where others use them as
    well."""
    sizes, tier = ClusterSizes.of(policy, call, least_slot), Tier(policy.hidden_tier)
    codec, width, sequences = sizes.codec, call.shape.width, call.sequences
    layers, kept, slot = sequences * sizes.layers, sizes.kept, sizes.slot_bytes

    def arena(slab_bytes: int, header: int = 0) -> int:
        return arena_bytes(
            codec, rows=layers * kept, records=layers * sizes.records, most_rows=sizes.record_rows, width=width,
            element_bytes=call.element, slab_bytes=slab_bytes, store_bytes=store, header=header,
        )  # fmt: skip

    records = banks = activations = 0
    store = slot
    if kept:
        records = codec_bytes(codec, kept, width, element_bytes=call.element, records=sizes.records)
        if tier is Tier.HOST:  # what a sequence stores of a layer, each record in whole pages
            store = max(slot, min(STORE_BYTES, (-(-records // UNIT) + sizes.records) * UNIT))
        # What every call books for a refresh without clusters.
        room = call.context * sizes.row + part_bytes(call)
        activations = max(refresh_bytes(sizes) - room, update_bytes(sizes) - room, 0)
    if codec.needs_base and layers:  # new ones of a layer stand beside those they replace
        banks = (layers + 1) * centroid_bytes(sizes.clusters, width, element_bytes=call.element)
    slab = best_slab(slot, arena)
    fetched = min(MOST_FETCH_SLOTS, sequences * min(policy.top_m, max(1, sizes.clusters)) + 2)
    return RecordBytes(
        tier=tier,
        clusters=sizes.clusters,
        records=layers * records,
        arena=arena(slab),
        file=arena(slab + UNIT, HEADER_BYTES),
        references=sequences * sizes.scored * _reference_bytes(sizes),
        banks=banks,
        slot_bytes=slot,
        store_bytes=store,
        slab_bytes=slab,
        fetch_slots=fetched if tier is Tier.HOST else 1,
        store_slots=STORE_SLOTS if tier is Tier.HOST else 1,
        activations=activations,
    )


def _reference_bytes(sizes: ClusterSizes) -> int:
    """What one layer of one sequence keeps from update to update (`tiered.policies.polestar.layer_state`)."""
    shape, clusters = sizes.call.shape, sizes.clusters
    queries = clusters * shape.heads * shape.head_dim * sizes.call.element
    # Scores of the block's columns; peak and mass of the rest, part by part and in all.
    attention = (
        _FLOAT32
        * shape.heads
        * max(clusters * (sizes.block + 4), sizes.with_parts * (sizes.block + 2 * sizes.parts + 2))
    )
    columns = _INT64 * (2 * sizes.call.context + sizes.block + sizes.parts)
    return queries + attention + columns + (_INT64 + 1) * clusters
