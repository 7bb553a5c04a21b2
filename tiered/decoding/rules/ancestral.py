"""A sample from the posterior of the next noise level: GIDD's ancestral sampler (arXiv 2503.04482, section 3)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.decoding.random_streams import RandomStreams
from tiered.decoding.rules.base import Candidates, CommitState
from tiered.decoding.rules.rewriting import RewritingRule, RewritingState
from tiered.decoding.sampling import OpenBlock, drawn_from
from tiered.models.noise import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestral(RewritingRule):
    """Every token of the block is drawn anew from q(z_s | z_t, x̂), from noise level t to the next cleaner one, s.

    x̂ is the model's distribution at the temperature, cut by `top_p` and `top_k`; at temperature 0 all of it is on the
    likeliest token. A token that noise cannot have put there and the model does not expect stays as it is.

    Attributes:
        noise_schedule: how noise falls over a block's steps, "cosine" or "linear".
    """

    name: ClassVar[str] = "ancestral"
    rank: ClassVar[int] = 2

    @property
    def draws(self) -> bool:
        return True

    def start(self, steps_per_block: int, streams: RandomStreams | None = None) -> CommitState:
        return _Posterior(self, steps_per_block)


class _Posterior(RewritingState):
    def propose(self, block: OpenBlock) -> Candidates:
        assert block.streams is not None, "a rule that draws needs streams"
        process, noisy, cleaner = self.levels(block)
        tokens = block.tokens.clone()
        expected = drawn_from(block)
        for sequence, rows in enumerate(block.pending_rows()):
            if len(rows):
                current = block.tokens[sequence, rows]
                weights = posterior(expected[sequence, rows], current, process, noisy, cleaner)
                tokens[sequence, rows] = draw(weights, block.streams, sequence)
                del weights  # else the next sequence's would stand beside them
        return block.candidates(tokens, torch.zeros_like(tokens, dtype=torch.float64))

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._step += 1
        return candidates.pending

    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        return changed.new_full((len(changed),), self._step >= self._steps)


def draw(weights: Float[Tensor, "rows vocab"], streams: RandomStreams, sequence: int) -> Int[Tensor, " rows"]:
    """A token for each row, by weight, from the sequence's own stream."""
    # The largest of log-weights plus Gumbel numbers is a draw by weight. Here both are raised to e, for the logarithm
    # in float64 would take as much room as the numbers.
    return streams.gumbel(sequence, *weights.shape).exp_().mul_(weights).argmax(dim=-1)


def posterior(
    expected: Float[Tensor, "rows vocab"], current: Tensor, process: Noise, noisy: float, cleaner: float
) -> Float[Tensor, "rows vocab"]:
    """q(z_s | z_t, x̂) up to a factor by row: q_s(z) · q(z_t | z_s = z).

    Args:
        expected: x̂, the distribution of the clean token.
        current: z_t.
        process: of the noise.
        noisy, cleaner: log-SNR of t and of s.
    """
    clean_t, clean_s = process.clean(noisy), process.clean(cleaner)
    kept = clean_t / clean_s
    of_token_t, of_mask_t = process.probability(noisy)
    of_token_s, of_mask_s = process.probability(cleaner)
    marginal = clean_s * expected + (1 - clean_s) * of_token_s
    marginal[:, process.mask_token_id] += (1 - clean_s) * (of_mask_s - of_token_s)
    # What noise adds between s and t, by the token that it puts there.
    added_token = max(0.0, (1 - clean_t) * of_token_t - kept * (1 - clean_s) * of_token_s)
    added_mask = max(0.0, (1 - clean_t) * of_mask_t - kept * (1 - clean_s) * of_mask_s)
    added = expected.new_full(current.shape, added_token).masked_fill_(current == process.mask_token_id, added_mask)
    weights = marginal * added[:, None]
    own = current[:, None]
    weights.scatter_add_(-1, own, kept * marginal.gather(-1, own))
    impossible = weights.sum(dim=-1, keepdim=True) == 0
    return weights.scatter_add_(-1, own, impossible.to(weights.dtype))
