"""All tokens that are confident enough: Fast-dLLM's parallel decoding (arXiv 2505.22618, section 3.3)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from tiered.core.checks import check_number, check_switch
from tiered.decoding.random_streams import RandomStreams
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(CommitRule):
    """Fix every candidate whose confidence is at least `confidence_threshold`, and always the most confident one.

    Attributes:
        confidence_threshold: a candidate passes from this confidence on; in [0, 1].
        parity: as the authors' code for Dream without a cache: of a block's n tokens a step fixes n / steps at most,
            and what earlier ones left of theirs; once the steps are over, as many as pass. The block is the whole
            answer where no block length is given.
    """

    name: ClassVar[str] = "threshold"
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})
    confidence_threshold: float
    parity: bool = False

    def __post_init__(self) -> None:
        check_number("confidence_threshold", self.confidence_threshold, least=0.0, most=1.0)
        check_switch("parity", self.parity)

    @property
    def by_time(self) -> bool:
        return self.parity

    def start(self, steps_per_block: int, streams: RandomStreams | None = None) -> CommitState:
        if self.parity:
            return _Shared(self.confidence_threshold, steps_per_block)
        return _AtLeast(self.confidence_threshold)


class _AtLeast(CommitState):
    def __init__(self, bound: float) -> None:
        self._bound = bound

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        confident = candidates.confidence >= self._bound
        return candidates.pending & (confident | (candidates.ranks() == 0))


class _Shared(_AtLeast):
    def __init__(self, bound: float, steps: int) -> None:
        super().__init__(bound)
        self._steps = steps

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._count = self._left = pending.sum(dim=1, keepdim=True)
        self._step = 0

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._step += 1
        due = self._count * min(self._step, self._steps) // self._steps
        allowed = (due - (self._count - self._left)).clamp(min=1)
        chosen = super().choose(candidates) & (candidates.ranks() < allowed)
        self._left = self._left - chosen.sum(dim=1, keepdim=True)
        return chosen
