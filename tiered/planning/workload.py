"""Books: a policy and the sizes of a call together, and how far they can grow under a budget."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.forward.sizes import CallSizes
from tiered.forward.weight_bytes import WeightBytes
from tiered.offload.codec_bytes import Codec
from tiered.planning.call_bytes import CallBytes
from tiered.policies.base import Policy
from tiered.policies.polestar.policy import Polestar
from tiered.policies.polestar.record_bytes import hidden_record_bytes

# Where a search for the largest size ends; no device holds what costs nothing per row and still needs more.
LARGEST_SIZE = 2**40
UNCAPPED = MemoryBudget()


@dataclass(frozen=True, slots=True)
class Workload:
    """What one call asks of the tiers."""

    policy: Policy
    sizes: CallSizes

    def resized(self, **sizes: Any) -> "Workload":
        """The same with these sizes."""
        return Workload(self.policy, replace(self.sizes, **sizes))

    def needed(self, budget: MemoryBudget = UNCAPPED) -> CallBytes:
        """What the call takes, with as few layers streamed as `budget` needs."""
        sizes = self.sizes
        weights = WeightBytes.of(sizes.shape, sizes.dtype, sizes.weights, gpu=sizes.gpu is not None)
        return CallBytes.of(self.policy, sizes, budget, weights=weights)

    def accounts(self, budget: MemoryBudget = UNCAPPED) -> dict[Tier, dict[Account, int]]:
        """Bytes of every tier by account. `budget` decides which layers are streamed, and what goes to disk."""
        return self.needed(budget).tiers(budget)

    def total(self, tier: Tier = Tier.DEVICE, budget: MemoryBudget = UNCAPPED) -> int:
        """Bytes of `tier` in all."""
        return sum(self.accounts(budget)[tier].values())

    def over(self, budget: MemoryBudget) -> dict[Tier, int]:
        """The tiers whose cap is too small, with the bytes that are needed there."""
        totals = {tier: sum(accounts.values()) for tier, accounts in self.accounts(budget).items()}
        caps = {tier: budget.cap(tier) for tier in Tier}
        return {tier: totals[tier] for tier, cap in caps.items() if cap is not None and totals[tier] > cap}

    def largest(self, size: Literal["batch", "context"], budget: MemoryBudget, *, multiple: int = 1) -> int:
        """The largest `size`, in multiples of `multiple`, that keeps every tier within `budget`; 0 where none does.

        Everything else stays as it is. A bisection, since the totals grow with either size; only where more sequences
        round the rows of a part down, or records fill their slots better, they dip, and it may stop there. What comes
        back has been counted, so it fits.
        """
        values = range(multiple, LARGEST_SIZE, multiple)
        return multiple * bisect_left(values, True, key=lambda value: bool(self.resized(**{size: value}).over(budget)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenBytes:
    """What hidden states would take in each codec, beside a policy that keeps none, as `polestar` keeps them on the
    host.

    Attributes:
        codecs: bytes of the records by codec.
        clusters: clusters in each layer of each sequence.
        centroids: bytes on the device of centroids, and of what drift is measured with.
        staging: bytes of the rings on the device that records pass through.
        slots: of these rings.
    """

    codecs: Mapping[Codec, int]
    clusters: int
    centroids: int
    staging: int
    slots: int

    @classmethod
    def of(cls, sizes: CallSizes) -> "HiddenBytes":
        """For the context and sequences of a call."""
        by_codec = {codec: hidden_record_bytes(Polestar(codec=codec), sizes) for codec in Codec}
        records = by_codec[Codec(Polestar().codec)]
        assert records is not None, "its defaults keep hidden states"
        return cls(
            codecs={codec: found.records for codec, found in by_codec.items() if found is not None},
            clusters=records.clusters,
            centroids=records.references + records.banks,
            staging=records.staging,
            slots=records.fetch_slots + records.store_slots,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return asdict(self) | {"codecs": {codec.value: size for codec, size in self.codecs.items()}}
