"""Rules with a number of tokens a step: LLaDA's own sampler (arXiv 2502.09992, algorithm 5), and SDAR's samplers (arXiv
2510.06303).

SDAR's rules follow the authors' code (JetAstra/SDAR, commit c2041a83), which counts the whole block, even if its first
tokens are the prompt's. Unlike there, fixed tokens are not chosen again, and a block that is still open after its steps
goes on.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from tiered.core.checks import check_number
from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(CommitRule):
    """Divide a block's n tokens by s steps: n // s in each, and one more in each of the first n mod s."""

    name: ClassVar[str] = "static"
    rank: ClassVar[int] = 0

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Quota(steps_per_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota(CommitRule):
    """Divide a block of n tokens by s steps: the n // s most confident in each, and one more in each of the first n mod
    s. If at least as many are above a threshold, fix all of these.

    Attributes:
        confidence_threshold: confidence above which candidates pass; in [0, 1]. None for no threshold.
    """

    name: ClassVar[str] = "quota"
    rank: ClassVar[int] = 2
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})
    tempered_confidence: ClassVar[bool] = True
    top_k_first: ClassVar[bool] = True
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.confidence_threshold is not None:
            check_number("confidence_threshold", self.confidence_threshold, least=0.0, most=1.0)

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Surest(steps_per_block, self.confidence_threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential(CommitRule):
    """As many tokens a step as `quota`, from the first open one on, at any confidence."""

    name: ClassVar[str] = "sequential"
    rank: ClassVar[int] = 2
    tempered_confidence: ClassVar[bool] = True
    top_k_first: ClassVar[bool] = True

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _First(steps_per_block)


class _Counted(CommitState):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._step = 0

    def _due(self, block: int) -> int:
        due = block // self._steps + (self._step < block % self._steps)
        self._step += 1
        return max(1, due)


class _Surest(_Counted):
    def __init__(self, steps: int, bound: float | None) -> None:
        super().__init__(steps)
        self._bound = bound

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        due = self._due(candidates.pending.shape[1])
        surest = candidates.pending & (candidates.ranks() < due)
        if self._bound is None:
            return surest
        confident = candidates.pending & (candidates.confidence > self._bound)
        return confident.where(confident.sum(dim=1, keepdim=True) >= due, surest)


class _First(_Counted):
    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        pending = candidates.pending
        # Counted from the first open token, including fixed ones.
        place = (pending.cumsum(dim=1) > 0).cumsum(dim=1)
        return pending & (place <= self._due(pending.shape[1]))


class _Quota(_Counted):
    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        super().begin_block(pending)
        count = pending.sum(dim=1, keepdim=True)
        self._least = count // self._steps  # tokens of a step
        self._with_one_more = count % self._steps  # first steps, which fix one token more

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        quota = self._least + (self._step < self._with_one_more)
        self._step += 1
        return candidates.pending & (candidates.ranks() < quota)
