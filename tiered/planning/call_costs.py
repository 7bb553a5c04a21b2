"""Books: everything that one call takes of every tier, and which features are streamed so that it fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.forward.stream_costs import StreamCosts
from tiered.offload.slabs import UNIT
from tiered.planning.call_sizes import CallSizes
from tiered.planning.feature_placement import WORKSPACES, Placement, everything, placed
from tiered.planning.policy_costs import added, policy_bytes
from tiered.policies.polestar.record_costs import TierCosts
from tiered.tiers.host_costs import DISK_HEADER, below_device


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCosts:
    """Bytes of one call beside the weights. The runtime books what stands here, and the plan prints it.

    Attributes:
        passes: on the device by account, as long as the call lasts: features, logits, and what passes take.
        hidden: hidden states that the policy keeps in the tiers; None: none.
        streams: features of which some layers are streamed; None: none.
    """

    passes: Mapping[Account, int]
    hidden: TierCosts | None
    streams: StreamCosts | None

    @classmethod
    def of(cls, sizes: CallSizes, budget: MemoryBudget, held: Mapping[Tier, int]) -> "CallCosts":
        """The costs of a call of `sizes` beside `held` bytes of each tier, with as few layers streamed as `budget`
        needs. Where it does not fit at all: with what takes the least of the device that the tiers below have room for.
        """
        policy, shape = sizes.policy, sizes.shape
        whole = policy_bytes(sizes)
        kept = [feature for feature, layers in policy.features(shape).items() if layers == shape.layers > 1]
        forced = [feature for feature in kept if feature in policy.host_features()]
        options = policy.hidden()

        @cache
        def hidden(least_slot: int) -> TierCosts | None:
            if options is None:
                return None
            return TierCosts.of(
                options,
                shape,
                batch=sizes.batch,
                context=sizes.context,
                block_length=sizes.block_length,
                dtype=sizes.dtype,
                answer=sizes.answer,
                least_slot=least_slot,
            )

        def costs(placement: Placement) -> CallCosts:
            return cls._with(placement, sizes, whole, hidden)

        def over(placement: Placement, *tiers: Tier) -> bool:
            needed = costs(placement).tiers(budget)
            caps = {tier: budget.cap(tier) for tier in tiers}
            return any(
                cap is not None and held.get(tier, 0) + sum(needed[tier].values()) > cap for tier, cap in caps.items()
            )

        def below(placement: Placement) -> bool:
            return not over(placement, Tier.HOST, Tier.DISK)

        if budget.cap(Tier.DEVICE) is None:
            return costs((dict.fromkeys(forced, shape.layers), WORKSPACES))
        found = placed(kept, forced, shape.layers, lambda placement: not over(placement, Tier.DEVICE), below)
        if found is not None:
            return costs(found)
        resident = costs((dict.fromkeys(forced, shape.layers), WORKSPACES))
        streamed = everything(kept, shape.layers)
        least = costs(streamed)
        return (
            least if kept and below(streamed) and least.total(Tier.DEVICE) < resident.total(Tier.DEVICE) else resident
        )

    @classmethod
    def _with(
        cls,
        placement: Placement,
        sizes: CallSizes,
        whole: Mapping[Account, int],
        hidden: Callable[[int], TierCosts | None],
    ) -> "CallCosts":
        counts, workspaces = placement
        alone = hidden(0)
        streams = StreamCosts.of(
            counts,
            sizes.shape,
            workspaces=workspaces,
            batch=sizes.batch,
            context=sizes.context,
            answer=sizes.answer,
            dtype=sizes.dtype,
            least_slot=0 if alone is None else alone.slot_bytes,
        )
        if streams is None:
            return cls(passes=whole, hidden=alone, streams=None)
        passes = dict(whole)
        for stream in streams.streams:
            passes[stream.account] -= stream.saved
        passes = added(passes, {Account.ACTIVATIONS: streams.activations})
        return cls(passes=passes, hidden=hidden(streams.slot_bytes), streams=streams)

    @property
    def slot_bytes(self) -> int:
        """Of a staging slot; 0 where there are no tiers."""
        return max((part.slot_bytes for part in (self.hidden, self.streams) if part is not None), default=0)

    @property
    def store_slots(self) -> int:
        """Of the ring that records leave through."""
        return max((part.store_slots for part in (self.hidden, self.streams) if part is not None), default=0)

    def tiers(self, budget: MemoryBudget) -> dict[Tier, dict[Account, int]]:
        """Bytes of every tier by account; `budget` decides what goes to disk (`below_device`)."""
        hidden = {} if self.hidden is None else self.hidden.tiers(budget)
        device = added(self.passes, hidden.get(Tier.DEVICE, {}))
        streams = self.streams
        if streams is None:
            return {Tier.DEVICE: device, Tier.HOST: hidden.get(Tier.HOST, {}), Tier.DISK: hidden.get(Tier.DISK, {})}
        rings = streams.page_slots + self.store_slots - (0 if self.hidden is None else self.hidden.store_slots)
        records, slot = streams.records, streams.slot_bytes
        arena, file = streams.arena(slot), streams.arena(slot + UNIT, header=DISK_HEADER)
        if self.hidden is not None and self.hidden.options.tier is Tier.HOST:
            records = added(records, {Account.HIDDEN: self.hidden.records})
            arena, file = arena + self.hidden.arena, file + self.hidden.file
        below = below_device(budget, records, arena=arena, file=file, slot_bytes=slot)
        return {Tier.DEVICE: added(device, {Account.STAGING: rings * slot}), **below}

    def total(self, tier: Tier) -> int:
        """Bytes of a tier in all, without a disk tier."""
        return sum(self.tiers(MemoryBudget())[tier].values())
