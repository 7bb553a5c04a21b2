"""Books: everything that one call takes of every tier, and which features are streamed so that it fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.core.ledger import added
from tiered.forward.sizes import CallSizes
from tiered.forward.stream_bytes import StreamBytes
from tiered.offload.slabs import UNIT
from tiered.offload.spill_record import HEADER_BYTES
from tiered.planning.streamed_layers import StreamedLayers, fewest_streamed
from tiered.policies.base import Policy
from tiered.tiers.record_bytes import RecordBytes, below_device


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBytes:
    """Bytes of one call beside the weights. The runtime books what stands here, and the plan prints it.

    Attributes:
        steps: on the device by account, as long as the call lasts: features, logits, and what steps take.
        records: hidden states that the policy keeps as records in the tiers; None: none.
        streams: features of which some layers are streamed; None: none.
    """

    steps: Mapping[Account, int]
    records: RecordBytes | None
    streams: StreamBytes | None

    @classmethod
    def of(
        cls, policy: Policy, sizes: CallSizes, budget: MemoryBudget, held: Mapping[Tier, int] | None = None
    ) -> "CallBytes":
        """What a call of `sizes` takes beside `held` bytes of each tier, with as few layers streamed as `budget` needs.
        Where it does not fit at all: with what takes the least of the device that the tiers below have room for.
        """
        held, layers = held or {}, sizes.shape.layers
        whole = policy.device_bytes(sizes)
        kept = [feature for feature, count in policy.features(sizes.shape).items() if count == layers > 1]
        forced = [feature for feature in kept if feature in policy.host_features()]
        records = cache(lambda least_slot: policy.record_bytes(sizes, least_slot))

        def needed(streamed: StreamedLayers) -> CallBytes:
            alone = records(0)
            streams = StreamBytes.of(
                sizes,
                streamed.counts,
                workspaces=streamed.workspaces,
                least_slot=0 if alone is None else alone.slot_bytes,
            )
            if streams is None:
                return cls(steps=whole, records=alone, streams=None)
            steps = added(whole, {Account.ACTIVATIONS: streams.activations})
            for stream in streams.streams:
                steps[stream.account] -= stream.saved
            return cls(steps=steps, records=records(streams.slot_bytes), streams=streams)

        def room(tier: Tier, amounts: Mapping[Account, int]) -> bool:
            cap = budget.cap(tier)
            return cap is None or held.get(tier, 0) + sum(amounts.values()) <= cap

        def above(streamed: StreamedLayers) -> bool:
            return room(Tier.DEVICE, needed(streamed).device)

        def below(streamed: StreamedLayers) -> bool:
            amounts = needed(streamed).tiers(budget)
            return all(room(tier, amounts[tier]) for tier in (Tier.HOST, Tier.DISK))

        resident = StreamedLayers(dict.fromkeys(forced, layers))
        if budget.cap(Tier.DEVICE) is None:
            return needed(resident)
        found = fewest_streamed(kept, forced, layers, above, below)
        if found is not None:
            return needed(found)
        everything = StreamedLayers(dict.fromkeys(kept, layers), 1)
        least, most = needed(everything), needed(resident)
        smaller = kept and below(everything) and least.total(Tier.DEVICE) < most.total(Tier.DEVICE)
        return least if smaller else most

    @property
    def slot_bytes(self) -> int:
        """Of a staging slot that records arrive in; 0 where there are no tiers."""
        return max((part.slot_bytes for part in self._parts), default=0)

    @property
    def store_bytes(self) -> int:
        """Of a staging slot that records leave from."""
        return max((part.store_bytes for part in self._parts), default=0)

    @property
    def slab_bytes(self) -> int:
        """Of what the memory of records is cut from."""
        return max((part.slab_bytes for part in self._parts), default=0)

    @property
    def fetch_slots(self) -> int:
        """Of the ring that records arrive in."""
        return sum(part.fetch_slots for part in self._parts)

    @property
    def store_slots(self) -> int:
        """Of the ring that records leave through."""
        return max((part.store_slots for part in self._parts), default=0)

    @property
    def device(self) -> dict[Account, int]:
        """Bytes of the device by account."""
        device = self.steps if self.records is None else added(self.steps, self.records.device)
        staging = self.slot_bytes * self.fetch_slots + self.store_bytes * self.store_slots
        return {**device, Account.STAGING: staging} if self._parts else dict(device)

    @property
    def arenas(self) -> dict[Tier, int]:
        """Bytes that all records take of the memory of each tier, at most, if none goes to disk."""
        hidden, streams = self.records, self.streams
        arenas = {Tier.DEVICE: 0, Tier.HOST: 0 if streams is None else streams.arena(self.slab_bytes)}
        if hidden is not None:
            arenas[hidden.tier] += hidden.arena
        return arenas

    def tiers(self, budget: MemoryBudget) -> dict[Tier, dict[Account, int]]:
        """Bytes of every tier by account; `budget` decides what goes to disk (`below_device`)."""
        hidden, streams = self.records, self.streams
        if streams is None:
            below = {Tier.HOST: {}, Tier.DISK: {}} if hidden is None else hidden.below(budget)
            return {Tier.DEVICE: self.device, **below}
        records, file = streams.records, streams.arena(self.slab_bytes + UNIT, header=HEADER_BYTES)
        if hidden is not None and hidden.tier is Tier.HOST:
            records = added(records, {Account.HIDDEN: hidden.records})
            file += hidden.file
        below = below_device(
            budget,
            records,
            arena=self.arenas[Tier.HOST],
            file=file,
            slot_bytes=self.slot_bytes,
            slab_bytes=self.slab_bytes,
        )
        return {Tier.DEVICE: self.device, **below}

    @property
    def _parts(self) -> list[RecordBytes | StreamBytes]:
        return [part for part in (self.records, self.streams) if part is not None]

    def total(self, tier: Tier) -> int:
        """Bytes of a tier in all, without a disk tier."""
        return sum((self.device if tier is Tier.DEVICE else self.tiers(MemoryBudget())[tier]).values())
