"""All tokens that are confident enough: Fast-dLLM's parallel decoding (arXiv 2505.22618, section 3.3)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from tiered.core.checks import check_number
from tiered.decoding.random_streams import RandomStreams
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(CommitRule):
    """Fix every candidate whose confidence is at least `confidence_threshold`, and always the most confident one.

    Attributes:
        confidence_threshold: a candidate passes from this confidence on; in [0, 1].
    """

    name: ClassVar[str] = "threshold"
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})
    confidence_threshold: float

    def __post_init__(self) -> None:
        check_number("confidence_threshold", self.confidence_threshold, least=0.0, most=1.0)

    def start(self, steps_per_block: int, streams: RandomStreams | None = None) -> CommitState:
        return AtLeast(self.confidence_threshold)


class AtLeast(CommitState):
    """Has no memory of earlier steps."""

    def __init__(self, bound: float) -> None:
        self._bound = bound

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        confident = candidates.confidence >= self._bound
        return candidates.pending & (confident | (candidates.ranks() == 0))
