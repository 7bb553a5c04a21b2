"""All tokens that are confident enough: Fast-dLLM's parallel decoding (arXiv 2505.22618, section 3.3)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from tiered.checks import check_number
from tiered.commit.base import Candidates, CommitRule, CommitState, Memoryless
from tiered.decoding.sequence_noise import SequenceNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(CommitRule):
    """Fix every candidate whose confidence is at least `confidence_threshold`, and always the most confident one."""

    name: ClassVar[str] = "threshold"
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})
    confidence_threshold: float

    def __post_init__(self) -> None:
        check_number("confidence_threshold", self.confidence_threshold, least=0.0, most=1.0)

    def start(self, steps_per_block: int, noise: SequenceNoise | None = None) -> CommitState:
        return _AtLeast(self.confidence_threshold)


class _AtLeast(Memoryless):
    def __init__(self, bound: float) -> None:
        self._bound = bound

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        confident = candidates.confidence >= self._bound
        return candidates.pending & (confident | (candidates.ranks() == 0))
