"""The tokens that the model would most like to change: GIDD's adaptive sampler (dvruette/gidd-easydel, 6525e88)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.checks import check_integer
from tiered.decoding.random_streams import RandomStreams
from tiered.decoding.rules.base import Candidates, CommitState
from tiered.decoding.rules.rewriting import RewritingRule, RewritingState
from tiered.decoding.sampling import OpenBlock, proposals


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive(RewritingRule):
    """Rewrite the `tokens_per_step` tokens with the largest (p_max − p_current) · π(z).

    p_max is the probability of the likeliest token, p_current that of the token z which stands there, and π(z) how
    likely noise at this level is to have put it there: the same for all tokens under uniform noise, and 0 for all but
    masks under masks alone, where the rule fixes the most confident masks. The new token is the likeliest, or drawn at
    a temperature.

    A block ends after its steps, or earlier where nothing is left to change: a step at temperature 0 that changes
    nothing would be followed by others like it, and what cannot be noise is not touched.

    Attributes:
        tokens_per_step: how many tokens a step rewrites at most.
        noise_schedule: how noise falls over a block's steps, "cosine" or "linear"; it matters where π does.
    """

    name: ClassVar[str] = "adaptive"
    tokens_per_step: int = 1

    def __post_init__(self) -> None:
        check_integer("tokens_per_step", self.tokens_per_step, least=1)
        RewritingRule.__post_init__(self)

    def start(self, steps_per_block: int, streams: RandomStreams | None = None) -> CommitState:
        return MostWanted(self, steps_per_block)


class MostWanted(RewritingState):
    """Counts a block's steps, and knows which sequences have tokens left to change."""

    def __init__(self, rule: Adaptive, steps: int) -> None:
        super().__init__(rule, steps)
        self._tokens = rule.tokens_per_step

    def propose(self, block: OpenBlock) -> Candidates:
        process, level, _ = self.levels(block)
        # How likely noise at this level is to put each token where it stands: π(z).
        of_token, of_mask = process.probability(level)
        noise = block.logits.new_full(block.tokens.shape, of_token)
        noise.masked_fill_(block.tokens == block.mask_token_id, of_mask).masked_fill_(~block.pending, 0.0)
        self._settles = block.sampling.temperature == 0
        # A token that noise does not make is no noise any more once it stands.
        self._fixes = process.of_tokens(level) == 0
        found = proposals(block)
        gain = _gain(block, found.likeliest)
        gain *= noise / noise.sum(dim=-1, keepdim=True)
        return block.candidates(found.tokens, self.urgency(gain, noise))

    def urgency(self, gain: Float[Tensor, "batch rows"], noise: Tensor) -> Float[Tensor, "batch rows"]:
        """`gain`, and −inf for what cannot be noise."""
        return gain.masked_fill_(noise == 0, -torch.inf)

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._step += 1
        count = min(self._tokens, candidates.confidence.shape[1])
        wanted = candidates.confidence != -torch.inf
        chosen = candidates.pending & wanted & (candidates.ranks() < count)
        self._left = (wanted & ~chosen if self._fixes else wanted).any(dim=1)
        return chosen

    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        settled = ~changed.any(dim=1)
        if self._step >= self._steps:
            return torch.ones_like(settled)
        return ~self._left | settled if self._settles else ~self._left


def _gain(block: OpenBlock, likeliest: Tensor) -> Float[Tensor, "batch rows"]:
    """p_max − p_current, in place of the logits: they are the largest tensor of a step."""
    logits = block.logits
    logits -= logits.gather(-1, likeliest[..., None])
    logits.exp_()
    of_current = logits.gather(-1, block.tokens[..., None])[..., 0]
    return (1 - of_current) / logits.sum(dim=-1)
