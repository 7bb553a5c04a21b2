"""Every token by itself, by chance alone: the reverse process as Dream's rule origin takes it (arXiv 2508.15487)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from tiered.decoding.random_streams import RandomStreams
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.rules.timestep import Timed, check_schedule_floor


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

    def start(self, steps_per_block: int, streams: RandomStreams | None = None) -> CommitState:
        assert streams is not None, "a rule that draws needs streams"
        return _Chance(steps_per_block, self.schedule_floor, streams)


class _Chance(Timed):
    def __init__(self, steps: int, floor: float, streams: RandomStreams) -> None:
        super().__init__(steps, floor)
        self._streams = streams

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        super().begin_block(pending)
        self._drawn = self._streams.of_block()

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        return candidates.pending & (self._drawn.uniform(candidates.pending.shape[1]) < self.next_share())
