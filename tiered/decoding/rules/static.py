"""A fixed number of tokens a step: the schedule of LLaDA's own sampler (arXiv 2502.09992, algorithm 5)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from tiered.decoding.random_streams import RandomStreams
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(CommitRule):
    """A block's n tokens over s steps: n // s in each, and one more in each of the first n mod s."""

    name: ClassVar[str] = "static"
    rank: ClassVar[int] = 0

    def start(self, steps_per_block: int, streams: RandomStreams | None = None) -> CommitState:
        return _Quota(steps_per_block)


class _Quota(CommitState):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._count = pending.sum(dim=1, keepdim=True)
        self._step = 0

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        quota = self._count // self._steps + (self._step < self._count % self._steps)
        self._step += 1
        return candidates.pending & (candidates.ranks() < quota)
