"""Rules for uniform noise, under which a block's tokens stay open and may change until the block ends.

In a masked model, masks mark undecided tokens. Under uniform noise any token may be wrong, so a step rewrites some. A
block ends after its steps, or when a step has nothing to change. The rules are GIDD's adaptive sampler
(dvruette/gidd-easydel, 6525e88) and its ancestral sampler (arXiv 2503.04482, section 3).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.checks import check_integer, unknown_name
from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.sampling import drawn_from, proposals
from tiered.models.noise import SCHEDULES, Noise, NoiseSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RewritingRule(CommitRule):
    """Options of a rule that rewrites.

    Attributes:
        noise_schedule: schedule of the noise over a block's steps, "cosine" or "linear".
    """

    noise: ClassVar[frozenset[str]] = frozenset({"uniform", "mask"})
    rewrites: ClassVar[bool] = True
    noise_schedule: NoiseSchedule = "cosine"

    def __post_init__(self) -> None:
        if self.noise_schedule not in SCHEDULES:
            raise unknown_name("noise_schedule", str(self.noise_schedule), SCHEDULES)


class RewritingState(CommitState):
    """State of a rule whose tokens stay open. Its `choose` chooses rows to rewrite, and counts the block's steps.

    Attributes:
        weighs_masks: True if the mask token keeps its share of the distribution in `propose`.
        soft: `DiffusionModel.soft_tokens` of the last step; None in a block's first step, and for other models.
    """

    weighs_masks: ClassVar[bool] = False
    soft: Float[Tensor, "batch rows width"] | None = None

    def __init__(self, rule: RewritingRule, steps: int) -> None:
        self._rule, self._steps = rule, steps

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._step = 0

    def levels(self, block: OpenBlock) -> tuple[Noise, float, float]:
        """The noise process of the model's training, and the log-SNR before and after this step."""
        assert block.process is not None, "the runtime rejects the rule for other models"
        levels, now = block.process.log_snrs(self._steps, self._rule.noise_schedule), self._steps - self._step
        return block.process, levels[now], levels[now - 1]

    @abstractmethod
    def propose(self, block: OpenBlock) -> Candidates:
        """Proposed tokens of the rows, and the urgency of each as its confidence. The mask token's logits are −∞,
        unless the rule weighs masks."""

    @abstractmethod
    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        """True for sequences whose block ends with this step; `changed`: tokens that the step changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive(RewritingRule):
    """Rewrite the `tokens_per_step` tokens with the largest (p_max − p_current) · π(z).

    p_max is the probability of the likeliest token, p_current that of the current token z, and π(z) the probability of
    z under the noise at this level. Under masks alone π is 0 for other tokens than masks, and the rule fixes the most
    confident ones. The new token is the likeliest, or drawn at a temperature.

    A block ends after its steps, or earlier if no token is left to change, as after a step without changes at
    temperature 0.

    Attributes:
        tokens_per_step: most tokens that a step rewrites.
        noise_schedule: schedule of the noise over a block's steps, "cosine" or "linear"; it affects π alone.
    """

    name: ClassVar[str] = "adaptive"
    tokens_per_step: int = 1

    def __post_init__(self) -> None:
        check_integer("tokens_per_step", self.tokens_per_step, least=1)
        RewritingRule.__post_init__(self)

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return MostWanted(self, steps_per_block)


class MostWanted(RewritingState):
    def __init__(self, rule: Adaptive, steps: int) -> None:
        super().__init__(rule, steps)
        self._tokens = rule.tokens_per_step

    def propose(self, block: OpenBlock) -> Candidates:
        process, level, _ = self.levels(block)
        # π(z): probability of each current token under the noise at this level.
        of_token, of_mask = process.probability(level)
        noise = torch.full_like(block.tokens, of_token, dtype=torch.float32)
        noise.masked_fill_(block.tokens == block.mask_token_id, of_mask).masked_fill_(~block.pending, 0.0)
        self._settles = block.sampling.temperature == 0
        # If noise makes masks alone, a written token cannot be noise any more.
        self._fixes = process.of_tokens(level) == 0
        tokens, gain = block.by_rows(_tokens_and_gain)
        gain *= noise / noise.sum(dim=-1, keepdim=True)
        return block.candidates(tokens, self.urgency(gain, noise))

    def urgency(self, gain: Float[Tensor, "batch rows"], noise: Tensor) -> Float[Tensor, "batch rows"]:
        """`gain`, and −inf for tokens that cannot be noise."""
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


def _tokens_and_gain(block: OpenBlock) -> tuple[Int[Tensor, "batch rows"], Float[Tensor, "batch rows"]]:
    """Proposed tokens, and p_max − p_current. Overwrites the logits, the largest tensor of a step."""
    logits, found = block.whole, proposals(block)
    logits -= logits.gather(-1, found.likeliest[..., None])
    logits.exp_()
    of_current = logits.gather(-1, block.tokens[..., None])[..., 0]
    return found.tokens, (1 - of_current) / logits.sum(dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestral(RewritingRule):
    """Draw every token of the block anew from q(z_s | z_t, x̂), from noise level t to the next cleaner one, s.

    x̂ is the model's distribution at the temperature, cut by `top_p` and `top_k`; at temperature 0 all of it is on the
    likeliest token. A token with probability 0 under both the noise and the model stays as it is.

    Attributes:
        noise_schedule: schedule of the noise over a block's steps, "cosine" or "linear".
    """

    name: ClassVar[str] = "ancestral"
    rank: ClassVar[int] = 2

    @property
    def draws(self) -> bool:
        return True

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Posterior(self, steps_per_block)


class _Posterior(RewritingState):
    def propose(self, block: OpenBlock) -> Candidates:
        (tokens,) = block.by_rows(self._drawn)
        tokens = tokens.where(block.pending, block.tokens)
        return block.candidates(tokens, torch.zeros_like(tokens, dtype=torch.float64))

    def _drawn(self, block: OpenBlock) -> tuple[Int[Tensor, "batch rows"]]:
        process, noisy, cleaner = self.levels(block)
        tokens = block.tokens.clone()
        expected = drawn_from(block)
        for sequence, rows in enumerate(block.pending_rows()):
            if len(rows):
                current = block.tokens[sequence, rows]
                weights = posterior(expected[sequence, rows], current, process, noisy, cleaner)
                tokens[sequence, rows] = draw(weights, block.streams, block.sequence + sequence)
                del weights  # freed before the next sequence's weights are made
        return (tokens,)

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._step += 1
        return candidates.pending

    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        return changed.new_full((len(changed),), self._step >= self._steps)


def draw(weights: Float[Tensor, "rows vocab"], streams: Generators, sequence: int) -> Int[Tensor, " rows"]:
    """A token for each row, by weight, from the sequence's own stream."""
    # The argmax of log-weights plus Gumbel numbers is a draw by weight. Both are exponentiated here, because a float64
    # logarithm would take as much room as the numbers.
    return streams.gumbel(sequence, *weights.shape).exp_().mul_(weights).argmax(dim=-1)


def posterior(
    expected: Float[Tensor, "rows vocab"], current: Tensor, process: Noise, noisy: float, cleaner: float
) -> Float[Tensor, "rows vocab"]:
    """q(z_s | z_t, x̂) up to a factor by row: q_s(z) · q(z_t | z_s = z). `expected`: x̂, the distribution of the clean
    token; `current`: z_t; `noisy`, `cleaner`: log-SNR of t and s."""
    clean_t, clean_s = process.clean(noisy), process.clean(cleaner)
    kept = clean_t / clean_s
    of_token_t, of_mask_t = process.probability(noisy)
    of_token_s, of_mask_s = process.probability(cleaner)
    marginal = clean_s * expected + (1 - clean_s) * of_token_s
    marginal[:, process.mask_token_id] += (1 - clean_s) * (of_mask_s - of_token_s)
    # Probability of the noise added between s and t, by token.
    added_token = max(0.0, (1 - clean_t) * of_token_t - kept * (1 - clean_s) * of_token_s)
    added_mask = max(0.0, (1 - clean_t) * of_mask_t - kept * (1 - clean_s) * of_mask_s)
    added = expected.new_full(current.shape, added_token).masked_fill_(current == process.mask_token_id, added_mask)
    weights = marginal * added[:, None]
    own = current[:, None]
    weights.scatter_add_(-1, own, kept * marginal.gather(-1, own))
    impossible = weights.sum(dim=-1, keepdim=True) == 0
    return weights.scatter_add_(-1, own, impossible.to(weights.dtype))
