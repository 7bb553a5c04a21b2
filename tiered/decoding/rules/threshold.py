"""Fast-dLLM's rules: fix tokens above a threshold, or as many as are reliable together (arXiv 2505.22618, section
3.3)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from tiered.core.checks import check_number
from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(CommitRule):
    """Fix every candidate whose confidence is at least `confidence_threshold`, and always the most confident one.

    Attributes:
        confidence_threshold: least confidence of a candidate that passes; in [0, 1].
    """

    name: ClassVar[str] = "threshold"
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})
    confidence_threshold: float

    def __post_init__(self) -> None:
        check_number("confidence_threshold", self.confidence_threshold, least=0.0, most=1.0)

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return AtLeast(self.confidence_threshold)


class AtLeast(CommitState):
    def __init__(self, bound: float) -> None:
        self._bound = bound

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        confident = candidates.confidence >= self._bound
        return candidates.pending & (confident | (candidates.ranks() == 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor(CommitRule):
    """Fix the n most confident candidates, for the largest n with (n + 1)(1 − confidence of the n-th) ≤ `factor`.

    As in the authors' code, the most confident candidate always passes, and if only one pending candidate would be
    left, it passes too.

    Attributes:
        factor: bound above 0; a larger one lets more tokens pass together.
    """

    name: ClassVar[str] = "factor"
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})
    factor: float

    def __post_init__(self) -> None:
        check_number("factor", self.factor, least=0.0)
        if self.factor == 0:
            raise ValueError("factor = 0 would never let a second token pass; a number above 0 is allowed")

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Leading(self.factor)


class _Leading(CommitState):
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        best_first = candidates.confidence.sort(dim=1, descending=True, stable=True).values
        nth = torch.arange(1, best_first.shape[1] + 1, device=best_first.device, dtype=best_first.dtype)
        passes = best_first >= 1 - self._factor / (nth + 1)
        # The first passes at any confidence, even NaN, or a broken model's block would never end.
        leading = passes.cumprod(dim=1).sum(dim=1, keepdim=True).clamp(min=1)
        pending = candidates.pending.sum(dim=1, keepdim=True)
        count = leading.where(leading < pending - 1, pending)
        return candidates.pending & (candidates.ranks() < count)
