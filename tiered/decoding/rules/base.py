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
    """The model's proposals for the block's rows.

    Attributes:
        tokens: proposed ids.
        confidence: float64 score of each proposal; −inf for a row that is not pending, which sorts last.
        pending: True for rows without a fixed token.
        shift: KL in nats of each row's last-layer attention from the step before, mean over heads. NaN at a block's
            first step and at a refresh of every row. None unless `CommitRule.needs_shift`.
        broken: True for sequences with a pending row whose largest logit is not finite; None if not checked.
    """

    tokens: Int[Tensor, "batch block"]
    confidence: Float[Tensor, "batch block"]
    pending: Bool[Tensor, "batch block"]
    shift: Float[Tensor, "batch block"] | None = None
    broken: Bool[Tensor, " batch"] | None = None

    def ranks(self) -> Int[Tensor, "batch block"]:
        """Rank of each row by confidence in its sequence, from 0; of equal ones the leftmost comes first."""
        return self.confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)


class CommitState(ABC):
    """The mutable state of a rule in one call, made by `CommitRule.start`."""

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:  # noqa: B027
        """Begin a block with these rows to fix."""

    @abstractmethod
    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        """Pending rows to fix now. By the block's last step, every sequence with pending rows must get at least one."""

    def keep(self, sequences: list[int]) -> None:  # noqa: B027
        """Keep only these sequences (ascending); called at a block's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRule(ABC):
    """Options of a commit rule. Raises `ValueError` or `TypeError` on construction for options out of range.

    Rules are found in the files of this folder. The fields of a rule's dataclass are options of `generate` and flags of
    `tiered generate`, with its "Attributes" section as help.

    Attributes:
        rank: order of rules that the same options fit: the lowest rank is chosen, then the fewest options.
        noise: noise processes of the rule's models, as in `ModelShape.noise`.
        rewrites: whether a chosen token stays open, so that later steps of the block may rewrite it.
        in_blocks: True if the rule is for block-causal models only.
        needs_shift: whether the rule reads `Candidates.shift`, which takes memory and time to measure.
        confidences: allowed kinds of confidence, as in `Sampling.confidence`.
        by_time: True if the rule follows a time that falls over the steps, as Dream's do. The default block is then the
            whole answer, and all steps run, even if there are fewer tokens.
        tempered_confidence, top_k_first: as in `Sampling`.
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
    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        """Fresh state for one call. Rules with a schedule divide a block's tokens by `steps_per_block`. A rule that
        draws takes its numbers from `streams`, a block at a time (`Generators.of_block`)."""
