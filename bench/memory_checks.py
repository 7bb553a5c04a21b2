"""The ledger beside what torch allocates, in a run of its own.

A part of bench/memory.py.
"""

from collections.abc import Callable
from typing import Any

from allocations import Allocations
from jaxtyping import Bool, Int
from memory_timeline import MemoryTimeline
from torch import Tensor

import tiered
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.decoding.observers import Inspector
from tiered.forward.forward import Forward
from tiered.policies.base import Step, StepKind

PAGE = 4096
# What is kept: accounts that no pass comes and goes with, and by tier the modules that ask for their storages.
KEPT = frozenset(Account) - {
    Account.WEIGHTS, Account.CENTROIDS, Account.LOGITS, Account.ACTIVATIONS, Account.LIBRARIES
}  # fmt: skip
ASKED_BY = {
    Tier.DEVICE: ("tiered.forward.feature_store", "tiered.forward.paged_feature", "tiered.offload.arena"),
    Tier.HOST: ("tiered.offload.pinning",),
}


class KeptBytes(MemoryTimeline):
    """Compares the ledger with the storages that are alive, after every forward.

    Attributes:
        widest: by tier, bytes in the ledger and allocated after the forward at which they differ most; of equal ones,
            where most is held.
    """

    def __init__(self, ledger: Ledger, allocations: Allocations) -> None:
        super().__init__(ledger)
        self._allocations = allocations
        self.widest: dict[Tier, tuple[int, int]] = dict.fromkeys(ASKED_BY, (0, 0))

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """See `tiered.decoding.observers.Inspector`."""
        super().after_forward(step, kind, ids, forward, active)
        for tier, modules in ASKED_BY.items():
            booked = sum(size for account, size in self.samples[-1].tiers[tier].items() if account in KEPT)
            both = booked, self._allocations.held_by(*modules)
            self.widest[tier] = max(self.widest[tier], both, key=lambda pair: (abs(pair[0] - pair[1]), pair[0]))


def checks(run: Callable[[Inspector], tiered.GenerationOutput], ledger: Ledger) -> list[dict[str, Any]]:
    """What a call holds by `ledger`, beside what torch allocates while `run` makes that call."""
    with Allocations() as allocations:
        kept = KeptBytes(ledger, allocations)
        out = run(kept)
    rows = [
        _check(tier, "kept", booked, allocated, int(0.01 * booked) + PAGE)
        for tier, (booked, allocated) in kept.widest.items()
    ]
    # Without a GPU both tiers are ordinary memory. Weights were there before.
    host = max(sum(sample.tiers[Tier.HOST].values()) for sample in kept.samples)
    device = out.memory.peak_device_bytes - ledger.held(Tier.DEVICE, Account.WEIGHTS)
    rows.append(_check("both", "peak, passes included", device + host, allocations.peak, None))
    if out.memory.allocator_peak is not None:
        rows.append(_check(Tier.DEVICE, "peak of CUDA's allocator", device, out.memory.allocator_peak, None))
    return rows


def _check(tier: str, what: str, ledger: int, allocator: int, allowed: int | None) -> dict[str, Any]:
    """`allowed` None: the allocator has to stay below the ledger, which books passes at the most that they take."""
    difference = allocator - ledger
    return {
        "tier": str(tier),
        "what": what,
        "ledger": ledger,
        "allocator": allocator,
        "difference": difference,
        "allowed": allowed,
        "agrees": difference <= 0 if allowed is None else abs(difference) <= allowed,
    }
