"""Rules under which a block's tokens stay open, and may change again, until the block ends: what uniform noise needs.

A masked model shows by its masks what is undecided. Under uniform noise any token may be wrong, so a step rewrites
some, and a block ends after its steps, or once a step has nothing to change.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from tiered.core.checks import unknown_name
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.sampling import OpenBlock
from tiered.models.noise import SCHEDULES, Noise, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RewritingRule(CommitRule):
    """Options of a rule that rewrites.

    Attributes:
        noise_schedule: how noise falls over a block's steps, "cosine" or "linear".
    """

    noise: ClassVar[frozenset[str]] = frozenset({"uniform", "mask"})
    rewrites: ClassVar[bool] = True
    noise_schedule: Schedule = "cosine"

    def __post_init__(self) -> None:
        if self.noise_schedule not in SCHEDULES:
            raise unknown_name("noise_schedule", str(self.noise_schedule), SCHEDULES)


class RewritingState(CommitState):
    """State of a rule whose tokens stay open; its `choose` says which are rewritten, and counts the block's steps."""

    def __init__(self, rule: RewritingRule, steps: int) -> None:
        self._rule, self._steps = rule, steps

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._step = 0

    def levels(self, block: OpenBlock) -> tuple[Noise, float, float]:
        """The noise that the model was trained on, and its log-SNR in front of this step and behind it."""
        assert block.process is not None, "the runtime refuses the rule for other models"
        levels, now = block.process.log_snrs(self._steps, self._rule.noise_schedule), self._steps - self._step
        return block.process, levels[now], levels[now - 1]

    @abstractmethod
    def propose(self, block: OpenBlock) -> Candidates:
        """Tokens that could stand in the rows, and how urgent each is; the mask token's logits are −∞."""

    @abstractmethod
    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        """Sequences whose block ends with this step, which has changed these tokens."""
