"""How many bytes each tier holds, by account, after every forward of a call: the ledger, read as the call goes on."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.policies.base import Step, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """The tiers at one time.

    Attributes:
        forward: number of the forward that has just ended; -1: none yet.
        block: that it worked on.
        kind: of its pass; "" for none.
        seconds: since the timeline was made.
        tiers: bytes by tier and account; accounts that hold none are left out.
    """

    forward: int
    block: int
    kind: str
    seconds: float
    tiers: Mapping[Tier, Mapping[Account, int]]

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return asdict(self)


class MemoryTimeline:
    """An `Inspector` that reads `ledger` after each forward.

    A call books the passes of a model before it begins, at the most that they can take, so `ACTIVATIONS` and `LOGITS`
    are level; what moves is what comes and goes with records and centroids.

    Attributes:
        samples: one from before the call, and one for each forward.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._began = time.perf_counter()
        self.samples = [self._sample(-1, 0, "")]

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """None: see `tiered.decoding.observers.Inspector`."""
        return {}

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """See `tiered.decoding.observers.Inspector`."""
        self.samples.append(self._sample(len(self.samples) - 1, step.block, kind.value))

    def _sample(self, forward: int, block: int, kind: str) -> MemorySample:
        return MemorySample(
            forward=forward,
            block=block,
            kind=kind,
            seconds=time.perf_counter() - self._began,
            tiers={tier: self._ledger.accounts(tier) for tier in Tier},
        )
