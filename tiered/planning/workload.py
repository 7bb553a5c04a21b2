"""Books: one call as far as bytes go, and how far it can grow under a budget."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Feature, Tier
from tiered.forward.costs import weight_bytes
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.planning.call_costs import CallCosts
from tiered.planning.call_sizes import CallSizes
from tiered.planning.policy_costs import added
from tiered.policies.polestar.options import HiddenOptions
from tiered.policies.polestar.record_costs import TierCosts

if TYPE_CHECKING:
    from tiered.planning.library_costs import Gpu
    from tiered.policies.base import Policy

# Where a search for the largest size ends; no device holds what costs nothing per row and still needs more.
LARGEST_SIZE = 2**40
UNCAPPED = MemoryBudget()


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_width * BYTES_PER_ELEMENT[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one call asks of the tiers.

    Attributes:
        shape: sizes of the model.
        policy: what is kept, and what its passes take.
        batch: sequences asked for; `guidance` runs twice as many.
        context: positions of the canvas, prompt and answer together.
        block_length: positions of a block.
        dtype: of weights and activations, a key of `BYTES_PER_ELEMENT`.
        answer: positions behind the prompt, for features that are kept of them alone; None: any number of them.
        sampled: whether proposing tokens takes more than the logits; see `call_bytes`.
        gpu: that the call runs on; None: on the CPU.
    """

    shape: ModelShape
    policy: "Policy"
    batch: int
    context: int
    block_length: int
    dtype: str
    answer: int | None = None
    guidance: bool = False
    sampled: bool = False
    gpu: "Gpu | None" = None

    @property
    def features(self) -> Mapping[Feature, int]:
        """Layers for which the policy keeps each feature on the device."""
        return self.policy.features(self.shape)

    @property
    def hidden(self) -> HiddenOptions | None:
        """What hidden states the policy keeps in the tiers; None: none."""
        return self.policy.hidden()

    @property
    def sequences(self) -> int:
        """Sequences that go through a forward together."""
        return self.batch * (2 if self.guidance else 1)

    def hidden_costs(self, options: HiddenOptions) -> TierCosts:
        """What hidden states kept as `options` say take of each tier, whatever the policy keeps."""
        return TierCosts.of(
            options,
            self.shape,
            batch=self.sequences,
            context=self.context,
            block_length=self.block_length,
            dtype=self.dtype,
            answer=self.answer,
        )

    def costs(self, budget: MemoryBudget = UNCAPPED) -> CallCosts:
        """What the call takes beside the weights, with as few features streamed as `budget` needs."""
        sizes = CallSizes(
            policy=self.policy,
            shape=self.shape,
            batch=self.sequences,
            context=self.context,
            block_length=self.block_length,
            dtype=self.dtype,
            answer=self.answer,
            guidance=self.guidance,
            sampled=self.sampled,
            gpu=self.gpu,
        )
        return CallCosts.of(sizes, budget, {Tier.DEVICE: weight_bytes(self.shape, self.dtype)})

    def accounts(self, budget: MemoryBudget = UNCAPPED) -> dict[Tier, dict[Account, int]]:
        """Bytes of every tier by account, weights included. `budget` decides which features are streamed, and what
        goes to disk."""
        weights = {Account.WEIGHTS: weight_bytes(self.shape, self.dtype)}
        call = self.costs(budget).tiers(budget)
        return {tier: added(weights if tier is Tier.DEVICE else {}, call[tier]) for tier in Tier}

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
        sizes = range(multiple, LARGEST_SIZE, multiple)
        return multiple * bisect_left(sizes, True, key=lambda value: bool(replace(self, **{size: value}).over(budget)))
