"""Dream's rules maskgit_plus, topk_margin, entropy and origin, which fix tokens by a time (arXiv 2508.15487).

The time falls from 1 in equal steps, and determines the share of masked tokens that a step fixes.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor

from tiered.core.checks import check_number, check_temperature
from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState

# With more steps, times of neighbouring steps would be too close in float32.
MOST_STEPS = 10**6


def check_schedule_floor(floor: object) -> None:
    """Raise `TypeError` if `floor` is not a number, `ValueError` if it is not between 0 and 1, both exclusive."""
    check_number("schedule_floor", floor, least=0.0, most=1.0)
    if floor in (0, 1):
        raise ValueError(f"schedule_floor = {floor}; a number above 0 and below 1 is allowed")


class Timed(CommitState):
    def __init__(self, steps: int, floor: float, streams: Generators | None = None) -> None:
        """`floor`: end time of the last of a block's `steps`. `streams`: random streams; None for a rule that draws
        nothing."""
        self._streams = streams
        times: Float32[Tensor, " times"] = torch.linspace(1, floor, steps + 1)
        # 1 − s/t for each step from time t to s, in float32 as in the official code; the last step fixes all.
        self._shares: list[float] = [*(1 - times[1:-1] / times[:-2]).tolist(), 1.0]

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._step = 0
        if self._streams is not None:
            self._drawn = self._streams.of_block()

    def next_share(self) -> float:
        """Share of the masked tokens that this step fixes."""
        self._step += 1
        return self._shares[min(self._step, len(self._shares)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestep(CommitRule):
    """In a step from time t to s, fix the ⌊masks · (1 − s/t)⌋ most confident candidates of a sequence, and all in the
    last step. With as many steps as tokens, float32 rounding makes the first step fix none and the last two.

    Attributes:
        confidence_temperature: temperature of drawing the tokens to fix without replacement, by softmax(confidence /
            confidence_temperature); 0 for the most confident ones. Dream's `alg_temp`.
        schedule_floor: end time of the schedule, between 0 and 1, both exclusive. Dream's `eps`.
    """

    name: ClassVar[str] = "timestep"
    by_time: ClassVar[bool] = True
    rank: ClassVar[int] = 2
    tempered_confidence: ClassVar[bool] = True
    confidence_temperature: float = 0.0
    schedule_floor: float = 1e-3

    def __post_init__(self) -> None:
        check_temperature("confidence_temperature", self.confidence_temperature)
        check_schedule_floor(self.schedule_floor)

    @property
    def draws(self) -> bool:
        return self.confidence_temperature > 0

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Shares(self, steps_per_block, streams if self.draws else None)


class _Shares(Timed):
    def __init__(self, rule: Timestep, steps: int, streams: Generators | None) -> None:
        super().__init__(steps, rule.schedule_floor, streams)
        self._temperature = rule.confidence_temperature

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        super().begin_block(pending)
        # Counted here, because a policy may compute only some of the block's rows.
        self._masks: Int[Tensor, "batch 1"] = pending.sum(dim=1, keepdim=True)

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        # The product is in float32, as in the official code; a share is a float32 number, exact in Python's float.
        count = (self._masks.float() * self.next_share()).long()
        # If a policy computed fewer candidates than there are masks, the step must fix at least one of them.
        count = count.where(candidates.pending.sum(dim=1, keepdim=True) == self._masks, count.clamp(min=1))
        ranked = self._rank(candidates) if self._temperature > 0 else candidates
        chosen = candidates.pending & (ranked.ranks() < count)
        self._masks = self._masks - chosen.sum(dim=1, keepdim=True)
        return chosen

    def _rank(self, candidates: Candidates) -> Candidates:
        # The n largest of log p plus Gumbel numbers are n draws from p without replacement (arXiv 1903.06059).
        chance = self._drawn.gumbel(candidates.pending.shape[1])
        return replace(candidates, confidence=candidates.confidence / self._temperature + chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(CommitRule):
    """In a step from time t to s, fix each candidate independently with probability 1 − s/t, and all in the last step.

    Attributes:
        schedule_floor: end time of the schedule, between 0 and 1, both exclusive. Dream's `eps`.
    """

    name: ClassVar[str] = "origin"
    by_time: ClassVar[bool] = True
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})  # not used
    tempered_confidence: ClassVar[bool] = True
    schedule_floor: float = 1e-3

    def __post_init__(self) -> None:
        check_schedule_floor(self.schedule_floor)

    @property
    def draws(self) -> bool:
        return True

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Chance(steps_per_block, self.schedule_floor, streams)


class _Chance(Timed):
    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        return candidates.pending & (self._drawn.uniform(candidates.pending.shape[1]) < self.next_share())
