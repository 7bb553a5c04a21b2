"""Every token by itself, by chance alone: the reverse process as Dream's rule origin takes it (arXiv 2508.15487)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.rules.time_schedule import check_schedule_floor, fixed_shares
from tiered.decoding.sequence_noise import SequenceNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(CommitRule):
    """In a step from time t to s, fix each candidate with probability 1 − s/t, whatever the others do; all of them in
    the last step.

    Attributes:
        schedule_floor: the time at which the schedule ends, between 0 and 1, both exclusive. Dream's `eps`.
    """

    name: ClassVar[str] = "origin"
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})  # which it does not look at
    tempered_confidence: ClassVar[bool] = True
    schedule_floor: float = 1e-3

    def __post_init__(self) -> None:
        check_schedule_floor(self.schedule_floor)

    @property
    def by_time(self) -> bool:
        return True

    @property
    def draws(self) -> bool:
        return True

    def start(self, steps_per_block: int, noise: SequenceNoise | None = None) -> CommitState:
        assert noise is not None, "a rule that draws needs noise"
        return _Chance(fixed_shares(steps_per_block, self.schedule_floor), noise)


class _Chance(CommitState):
    def __init__(self, shares: list[float], noise: SequenceNoise) -> None:
        self._shares, self._noise = shares, noise

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._drawn = self._noise.of_block()
        self._step = 0

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        share = self._shares[min(self._step, len(self._shares) - 1)]
        self._step += 1
        return candidates.pending & (self._drawn.uniform(candidates.pending.shape[1]) < share)
