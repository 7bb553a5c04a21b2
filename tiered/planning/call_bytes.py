"""Books: all bytes of one call by tier, and the features that are streamed so that it fits."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tiered.core.budget import MemoryBudget
from tiered.core.buffers import Buffer, account_bytes
from tiered.core.byte_size import enough
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Feature, Tier
from tiered.core.ledger import added
from tiered.forward.attention_bytes import AttentionChunk
from tiered.forward.forward_bytes import compared_at_a_time
from tiered.forward.sizes import CallShape
from tiered.forward.stream_bytes import StreamBytes
from tiered.forward.weight_bytes import WeightBytes
from tiered.planning.streamed_layers import StreamedLayers, fewest_streamed
from tiered.policies.base import Policy
from tiered.tiers.record_bytes import RecordBytes

BELOW_DEVICE = (Tier.HOST, Tier.DISK)


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Bytes of one call. The runtime books them, and the plan prints them.

    Attributes:
        buffers: device memory of the call beside weights, stored rows and slots.
        records: hidden states that the policy keeps as records in the tiers; None if it keeps none.
        streams: features with streamed layers; None if all layers are on the device.
        weights: the streamed layers of the weights; None if the caller owns the weights and has already booked them.
        compared: the chunk of attention that a commit rule compares at a time; None for other rules.
        most_rows: most rows of a sequence that go through a layer in one forward; None for the whole canvas.
    """

    buffers: tuple[Buffer, ...]
    records: RecordBytes | None
    streams: StreamBytes | None
    weights: WeightBytes | None
    compared: AttentionChunk | None
    most_rows: int | None

    @classmethod
    def of(
        cls,
        policy: Policy,
        sizes: CallShape,
        budget: MemoryBudget,
        held: Mapping[Tier, int] | None = None,
        weights: WeightBytes | None = None,
    ) -> "CallBytes":
        """The bytes of a call of `sizes` beside `held` bytes of each tier. It streams as few layers as `budget` needs:
        of features if that is enough, else of `weights` if they may be streamed, else of both. If no call fits, it is
        the one that lacks the fewest bytes.
        """
        return _Search.of(policy, sizes, budget, held or {}, weights).best()

    @classmethod
    def fitting(
        cls,
        policy: Policy,
        sizes: CallShape,
        budget: MemoryBudget,
        held: Mapping[Tier, int],
        weights: WeightBytes | None,
        *,
        own: Mapping[Tier, int] = MappingProxyType({}),
        hint: str,
    ) -> "CallBytes":
        """As `of`; `own`: bytes of each tier that `weights` hold already.

        Raises:
            TierCapacityError: a tier has no room for the call. If more of another tier would help, the hint says how
                much.
        """
        search = _Search.of(policy, sizes, budget, held, weights)
        call = search.best()
        for tier, amounts in call.tiers(budget).items():
            cap, used, needed = budget.cap(tier), held.get(tier, 0), sum(amounts.values())
            if cap is None or used + needed <= cap:
                continue
            if tier is Tier.DEVICE:
                other, instead = search.with_more_host(), Tier.HOST
            else:
                resident, instead = search.with_cap(Tier.DEVICE, None), Tier.DEVICE
                other = resident.fewest()
                other = other if resident.fits(other) else None
            if other is not None:
                total = sum(other.tiers(budget)[instead].values()) + held.get(instead, 0)
                hint = f'or give the {instead} tier "{enough(total)}"; {hint}'
            before = own.get(tier, 0)
            raise TierCapacityError(needed - before, cap - used - before, tier, hint, used + needed)
        return call

    @property
    def fixed(self) -> Mapping[Account, int]:
        """Device bytes by account that are booked before the tiers open."""
        return account_bytes(self.buffers)

    @property
    def device(self) -> dict[Account, int]:
        return account_bytes(self.declared)

    @property
    def declared(self) -> list[Buffer]:
        """All device memory of the call."""
        parts = (part for part in (self.weights, self, self.streams, self.records) if part is not None)
        return [buffer for part in parts for buffer in part.buffers]

    @property
    def host(self) -> dict[Account, int]:
        """Bytes of the host by account, without those of weights."""
        return added(*(part.host for part in (self.records, self.streams) if part is not None))

    def tiers(self, budget: MemoryBudget) -> dict[Tier, dict[Account, int]]:
        """Bytes of every tier by account. `budget` decides which layers of weights pass through the host."""
        tiers = {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: {}}
        if self.weights is not None and self.weights.layers:
            tiers |= {tier: added(amounts, tiers[tier]) for tier, amounts in self.weights.lower(budget).items()}
        return tiers

    def total(self, tier: Tier) -> int:
        """Total bytes of a tier if no tier has a cap."""
        return sum((self.device if tier is Tier.DEVICE else self.tiers(MemoryBudget())[tier]).values())


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds the call that streams the fewest layers beside `held` bytes of each tier.

    Attributes:
        resident: the call with all features on the device.
        kept: features that are kept for all layers, and so may be streamed.
        forced: features of these that must be streamed.
    """

    sizes: CallShape
    budget: MemoryBudget
    held: Mapping[Tier, int]
    resident: CallBytes
    kept: list[Feature]
    forced: list[Feature]

    @classmethod
    def of(
        cls,
        policy: Policy,
        sizes: CallShape,
        budget: MemoryBudget,
        held: Mapping[Tier, int],
        weights: WeightBytes | None,
    ) -> "_Search":
        needs = policy.needs(sizes)
        resident = CallBytes(
            buffers=tuple(policy.buffers(sizes)),
            records=needs.records() if needs.records else None,
            streams=None,
            weights=weights,
            compared=compared_at_a_time(sizes) if sizes.compared else None,
            most_rows=needs.most_rows,
        )
        of_all = [feature for feature, count in policy.features(sizes.shape).items() if count == sizes.shape.layers]
        kept = of_all if _streamable(sizes) > 1 else []
        forced = [feature for feature in kept if feature in needs.on_host]
        return cls(sizes, budget, held, resident, kept, forced)

    def best(self) -> CallBytes:
        call = self.fewest()
        if self.fits(call) or (lower := self.with_more_host()) is None:
            return call
        return min((call, lower), key=self._lacks)

    def with_more_host(self) -> CallBytes | None:
        """A call that fits the device with a larger host; None if there is none, or the host has no cap."""
        if self.budget.cap(Tier.HOST) is None:
            return None
        call = self.with_cap(Tier.HOST, None).fewest()
        if call.weights is not None and call.weights.layers:
            call = self._streaming(call, call.weights.count)
        return call if self.fits(call, Tier.DEVICE) else None

    def with_cap(self, tier: Tier, cap: int | None) -> "_Search":
        return replace(self, budget=self.budget.with_cap(tier, cap))

    def fewest(self) -> CallBytes:
        features, weights = self._of_features(), self.resident.weights
        if weights is None or weights.fixed or self.fits(features):
            return features
        most, least = weights.most, self.with_cap(Tier.DEVICE, 0)._of_features()
        for call in (self.with_cap(Tier.DEVICE, None)._of_features(), least):
            found = bisect_left(
                range(most + 1),
                True,
                lo=min(weights.fewest, most),
                key=lambda count, call=call: self.fits(self._streaming(call, count), Tier.DEVICE),
            )
            if found <= most and self.fits(fitting := self._streaming(call, found)):
                return fitting
        if most >= weights.fewest and self.fits(everything := self._streaming(least, most), *BELOW_DEVICE):
            return everything
        return features

    def fits(self, call: CallBytes, *only: Tier) -> bool:
        """Whether `call` has room, in all tiers or in `only` these."""
        amounts = call.tiers(self.budget)
        return all(self._room(tier, amounts[tier]) for tier in only or Tier)

    def _room(self, tier: Tier, amounts: Mapping[Account, int]) -> bool:
        cap = self.budget.cap(tier)
        return cap is None or self.held.get(tier, 0) + sum(amounts.values()) <= cap

    def _lacks(self, call: CallBytes) -> int:
        totals = {tier: self.held.get(tier, 0) + sum(of.values()) for tier, of in call.tiers(self.budget).items()}
        return sum(max(0, total - cap) for tier, total in totals.items() if (cap := self.budget.cap(tier)) is not None)

    def _streaming(self, call: CallBytes, count: int) -> CallBytes:
        """`call` with `count` records of weights that the device has no room for, and as many of them on the host as
        fit there."""
        assert call.weights is not None, "streamed weights are the call's"
        weights, cap = call.weights.streaming(count), self.budget.cap(Tier.HOST)
        if cap is not None and weights.passes_host(self.budget):
            free = cap - self.held.get(Tier.HOST, 0) - sum(call.tiers(self.budget)[Tier.HOST].values())
            if sum(weights.lower(self.budget)[Tier.HOST].values()) > free:
                rings = sum(weights.streaming(count, weights.streamed).lower(self.budget)[Tier.HOST].values())
                here = max(0, free - rings) // weights.slot_bytes
                # Coded records go to the disk by way of the host.
                weights = weights.streaming(count, weights.streamed - max(here, 0 if weights.in_files else 1))
        return replace(call, weights=weights)

    def _of_features(self) -> CallBytes:
        """The call with the fewest streamed layers of features, and all weights on the device."""
        layers = _streamable(self.sizes)

        def needed(streamed: StreamedLayers) -> CallBytes:
            streams = StreamBytes.of(self.sizes, streamed.counts, slots=streamed.slots)
            if streams is None:
                return self.resident
            return replace(self.resident, buffers=tuple(streams.beside(self.resident.buffers)), streams=streams)

        def above(streamed: StreamedLayers) -> bool:
            return self._room(Tier.DEVICE, needed(streamed).device)

        def below(streamed: StreamedLayers) -> bool:
            return self.fits(needed(streamed), *BELOW_DEVICE)

        fewest = needed(StreamedLayers(dict.fromkeys(self.forced, layers)))
        if self.budget.cap(Tier.DEVICE) is None:
            return fewest
        found = fewest_streamed(self.kept, self.forced, layers, above, below)
        if found is not None:
            return needed(found)
        everything = StreamedLayers(dict.fromkeys(self.kept, layers), 1)
        most = needed(everything)
        smaller = self.kept and below(everything) and most.total(Tier.DEVICE) < fewest.total(Tier.DEVICE)
        return most if smaller else fewest


def _streamable(sizes: CallShape) -> int:
    """Number of layers whose features may be streamed."""
    found = sizes.shape.streamable()
    return 0 if found is None else len(found[1].layers)
