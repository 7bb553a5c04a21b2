"""The contract of a commit rule, and the ranking that rules share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.decoding.generators import Generators
from tiered.decoding.sampling_options import CONFIDENCES


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What the model proposes for the block's rows.

    Attributes:
        tokens: proposed ids.
        confidence: float64 score of each proposal; −inf where the row is not pending, so that it sorts last.
        pending: True where nothing is fixed yet.
        shift: KL in nats of each row's attention in the last layer from the step before, mean over heads; NaN at a
            block's first step and at a refresh of every row. None unless `CommitRule.needs_shift`.
        broken: sequences with a pending row whose largest logit is not finite; None if it was not looked for.
    """

    tokens: Int[Tensor, "batch block"]
    confidence: Float[Tensor, "batch block"]
    pending: Bool[Tensor, "batch block"]
    shift: Float[Tensor, "batch block"] | None = None
    broken: Bool[Tensor, " batch"] | None = None

    def ranks(self) -> Int[Tensor, "batch block"]:
        """0 for each sequence's most confident row, 1 for the next; of equals, the leftmost comes first."""
        return self.confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)


class CommitState(ABC):
    """The mutable part of a rule: made by `CommitRule.start` for one call."""

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:  # noqa: B027
        """A block begins, with these rows to fix."""

    @abstractmethod
    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        """Rows to fix now: pending ones, and at least one of every sequence that has any, at the latest in the
        block's last step."""

    def keep(self, sequences: list[int]) -> None:  # noqa: B027
        """Called at a block's end when only these sequences (ascending) go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRule(ABC):
    """Options of a commit rule. Raises `ValueError` or `TypeError` on construction for options out of range.

    Rules are found in the files of this folder. The fields of its dataclass are options of `generate` and flags of
    `tiered generate`, and its "Attributes" section is their help.

    Attributes:
        rank: of rules that the same options fit, the one with the lowest is meant, and of equals the one with the
            fewest options.
        noise: the noise processes whose models the rule is for, as in `ModelShape.noise`.
        rewrites: whether a chosen token stays open, and may be rewritten by every later step of the block.
        in_blocks: True if the rule is for models alone whose rows see blocks.
        needs_shift: whether the rule reads `Candidates.shift`; it takes memory and time to measure.
        confidences: the kinds of confidence that the rule can do with, as in `Sampling.confidence`.
        by_time: True if the rule follows a time that falls over the steps, as Dream's do. The block is then the whole
            answer by default, and all steps count, even if they are more than the tokens.
        tempered_confidence, top_k_first: what distribution tokens are drawn from, and whether it is what the rule looks
            at, as in `Sampling`.
    """

    name: ClassVar[str]
    rank: ClassVar[int] = 1
    noise: ClassVar[frozenset[str]] = frozenset({"mask"})
    rewrites: ClassVar[bool] = False
    in_blocks: ClassVar[bool] = False
    needs_shift: ClassVar[bool] = False
    by_time: ClassVar[bool] = False
    confidences: ClassVar[frozenset[str]] = frozenset(CONFIDENCES)
    tempered_confidence: ClassVar[bool] = False
    top_k_first: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        return False

    @abstractmethod
    def start(self, steps_per_block: int, streams: Generators | None = None) -> CommitState:
        """Fresh state for one call; rules with a schedule spread a block's tokens over `steps_per_block`. A rule that
        draws takes its numbers from `streams`, a block at a time (`Generators.of_block`)."""
