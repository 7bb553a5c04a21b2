"""Books: a policy with the sizes of a call, and how far they can grow under a budget."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tiered.core.budget import MemoryBudget
from tiered.core.buffers import account_bytes
from tiered.core.features import Account, Tier
from tiered.forward.sizes import CallShape
from tiered.forward.weight_bytes import WeightBytes
from tiered.offload.codec_bytes import Codec
from tiered.planning.call_bytes import CallBytes
from tiered.policies.base import Policy
from tiered.policies.polestar.hidden_bytes import hidden_buffers, hidden_record_bytes
from tiered.policies.polestar.policy import Polestar

# The end of a search for the largest size.
LARGEST_SIZE = 2**40
UNCAPPED = MemoryBudget()
ANSWER_BLOCKS = 8  # blocks of an answer without a given length


def prompt_of(sizes: CallShape) -> int:
    return sizes.context - answer_of(sizes)


def answer_of(sizes: CallShape) -> int:
    """Positions of the answer; without a given length, `ANSWER_BLOCKS` blocks, or as many as the prompt leaves."""
    if sizes.answer is not None:
        return sizes.answer
    return sizes.block_length * max(1, min(ANSWER_BLOCKS, sizes.context // sizes.block_length - 1))


@dataclass(frozen=True, slots=True)
class Workload:
    """A policy, and the sizes of a call under it."""

    policy: Policy
    sizes: CallShape

    def resized(self, **sizes: Any) -> "Workload":
        return Workload(self.policy, replace(self.sizes, **sizes))

    def needed(self, budget: MemoryBudget = UNCAPPED) -> CallBytes:
        """The bytes of the call, with as few layers streamed as `budget` needs."""
        sizes = self.sizes
        weights = WeightBytes.of(sizes.shape, sizes.dtype, sizes.weights, gpu=sizes.gpu is not None)
        return CallBytes.of(self.policy, sizes, budget, weights=weights)

    def accounts(self, budget: MemoryBudget = UNCAPPED) -> dict[Tier, dict[Account, int]]:
        """Bytes of every tier by account. `budget` decides which layers are streamed."""
        return self.needed(budget).tiers(budget)

    def total(self, tier: Tier = Tier.DEVICE, budget: MemoryBudget = UNCAPPED) -> int:
        return sum(self.accounts(budget)[tier].values())

    def over(self, budget: MemoryBudget) -> dict[Tier, int]:
        """The tiers whose cap is too small, with the bytes needed there."""
        totals = {tier: sum(accounts.values()) for tier, accounts in self.accounts(budget).items()}
        caps = {tier: budget.cap(tier) for tier in Tier}
        return {tier: totals[tier] for tier, cap in caps.items() if cap is not None and totals[tier] > cap}

    def largest(self, size: Literal["batch", "context"], budget: MemoryBudget, *, multiple: int = 1) -> int:
        """The largest `size`, in multiples of `multiple`, that keeps every tier within `budget`; 0 if none does.

        By bisection, first among powers of two, because totals grow with either size. They dip if more sequences or
        columns make the parts of a step smaller. The search may stop there; its result was counted, so it fits.
        """

        def too_large(count: int) -> bool:
            return bool(self.resized(**{size: multiple * count}).over(budget))

        end = bisect_left(range((LARGEST_SIZE // multiple).bit_length()), True, key=lambda power: too_large(2**power))
        # 2**end is too large, and half of it is not.
        return multiple * (bisect_left(range(2**end), True, lo=2**end // 2 + 1, key=too_large) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenBytes:
    """Bytes of hidden states in each codec, if the policy kept them on the host, as `polestar` does.

    Attributes:
        codecs: bytes of the records by codec.
        clusters: clusters in each layer of each sequence.
        centroids: device bytes of centroids and of the references of drift.
        staging: device bytes of the slots that records pass through.
        slots: number of these slots.
    """

    codecs: Mapping[Codec, int]
    clusters: int
    centroids: int
    staging: int
    slots: int

    @classmethod
    def of(cls, sizes: CallShape) -> "HiddenBytes":
        policies = {codec: Polestar(codec=codec) for codec in Codec}
        by_codec = {
            codec: hidden_record_bytes(policy.cluster_sizes(sizes), policy.hidden_tier)
            for codec, policy in policies.items()
        }
        records = by_codec[Codec(Polestar().codec)]
        on_device = account_bytes([*hidden_buffers(Polestar().cluster_sizes(sizes)), *records.buffers])
        return cls(
            codecs={codec: found.records for codec, found in by_codec.items()},
            clusters=records.clusters,
            centroids=on_device.get(Account.CENTROIDS, 0),
            staging=records.staging,
            slots=records.slots,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"codecs": {codec.value: size for codec, size in self.codecs.items()}}
