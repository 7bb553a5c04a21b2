"""Rules under which a block's tokens stay open, and may change again, until the block ends: what uniform noise needs.

A masked model shows by its masks what is undecided. Under uniform noise any token may be wrong, so a step rewrites
some, and a block ends after its steps, or once a step has nothing to change.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.checks import unknown_name
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.sampling_options import Sampling
from tiered.decoding.sequence_noise import SequenceNoise
from tiered.models.noise import SCHEDULES, Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBlock:
    """A step's view of the block.

    Attributes:
        logits: of the rows that the step has computed; scratch space. The mask token's are −∞.
        tokens: what stands there now.
        pending: rows that may be rewritten.
        remaining: how many there are, by sequence.
        process: the noise that the model was trained on.
        sampling, noise: how tokens are drawn, and from which streams.
    """

    logits: Float[Tensor, "batch rows vocab"]
    tokens: Int[Tensor, "batch rows"]
    pending: Bool[Tensor, "batch rows"]
    remaining: list[int]
    process: Noise
    sampling: Sampling
    noise: SequenceNoise

    def token_noise(self, log_snr: float) -> Float[Tensor, "batch rows"]:
        """How likely noise at this level is to put each token where it stands: π(z)."""
        of_token, of_mask = self.process.probability(log_snr)
        masks = self.tokens == self.process.mask_token_id
        return torch.where(masks, self.logits.new_tensor(of_mask), self.logits.new_tensor(of_token))


class RewritingState(CommitState):
    """State of a rule whose tokens stay open; its `choose` says which are rewritten."""

    @abstractmethod
    def propose(self, block: OpenBlock) -> Candidates:
        """Tokens that could stand in the rows, and how urgent each is."""

    @abstractmethod
    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        """Sequences whose block ends with this step, which has changed these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewritingRule(CommitRule):
    """Options of a rule that rewrites."""

    noise: ClassVar[frozenset[str]] = frozenset({"uniform", "mask"})
    rewrites: ClassVar[bool] = True


def check_noise_schedule(schedule: str) -> None:
    """Raise `ValueError` for what is no schedule."""
    if schedule not in SCHEDULES:
        raise unknown_name("noise_schedule", str(schedule), SCHEDULES)
