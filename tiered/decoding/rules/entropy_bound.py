"""DiffusionGemma's rule: accept drawn tokens up to a bound of their entropies, and draw all others anew as noise
(arXiv 2505.24857; transformers, `EntropyBoundSampler`)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.checks import check_integer, check_number
from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.rules.rewriting import RewritingState
from tiered.decoding.tiled_sums import TiledSums
from tiered.models.logit_tiles import LogitTiles

MOST = 1e6  # of a temperature or an entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBound(CommitRule):
    """In every step, draw a token for each row at the step's temperature. Keep those with the lowest entropies, as long
    as the entropies of the others among them sum up to at most `entropy_bound`, and at least one. All other rows get
    random tokens. Nothing is kept between steps: a row may become noise again.

    A block ends after its steps, or once its likeliest tokens are stable and their mean entropy is low. Its tokens are
    then the likeliest ones. `temperature`, `top_p` and `top_k` do not count.

    Attributes:
        entropy_bound: nats, above 0.
        t_max, t_min: temperature of the first step, and the one that it falls towards, evenly by step.
        stability_threshold: steps before for which the likeliest tokens must have been the same for a block to end
            early; 0 for no such condition.
        stop_entropy: nats of mean entropy under which a block may end early; transformers' `confidence_threshold`.
    """

    name: ClassVar[str] = "entropy_bound"
    noise: ClassVar[frozenset[str]] = frozenset({"random"})
    rewrites: ClassVar[bool] = True
    in_blocks: ClassVar[bool] = True
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})  # not used
    entropy_bound: float = 0.1
    t_max: float = 0.8
    t_min: float = 0.4
    stability_threshold: int = 1
    stop_entropy: float = 0.005

    def __post_init__(self) -> None:
        for name in ("entropy_bound", "t_max"):
            check_number(name, getattr(self, name), least=0.0, most=MOST)
            if not getattr(self, name):
                raise ValueError(f"{name} = 0; a number above 0 is allowed")
        for name in ("t_min", "stop_entropy"):
            check_number(name, getattr(self, name), least=0.0, most=MOST)
        check_integer("stability_threshold", self.stability_threshold, least=0)

    @property
    def draws(self) -> bool:
        return True

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Accepting(self, steps_per_block, streams)


class _Accepting(RewritingState):
    weighs_masks = True

    def __init__(self, rule: EntropyBound, steps: int, streams: Generators) -> None:
        self._bound, self._steps, self._streams = rule, steps, streams

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        self._step, self.soft = 0, None
        self._likeliest: list[Int[Tensor, "batch block"]] = []
        self._noise = self._streams.of_block()

    def propose(self, block: OpenBlock) -> Candidates:
        assert isinstance(block.logits, LogitTiles), "this family's logits are in tiles"
        rule, left = self._bound, self._steps - self._step
        temperature = rule.t_min + (rule.t_max - rule.t_min) * left / self._steps
        found = TiledSums.of(block, temperature)
        noise = self._noise.tokens(found.drawn.shape[1], block.logits.vocab_size)
        ends = self._ends(found.likeliest, found.entropy)
        self._done, self.soft = ends if left > 1 else torch.ones_like(ends), found.soft
        tokens = found.drawn.where(self._accepted(found.entropy), noise)
        return block.candidates(found.likeliest.where(self._done[:, None], tokens), -found.entropy)

    def _ends(
        self, likeliest: Int[Tensor, "batch block"], entropy: Float[Tensor, "batch block"]
    ) -> Bool[Tensor, " batch"]:
        """True for sequences whose block may end early."""
        rule, before = self._bound, self._likeliest
        ends = entropy.mean(dim=-1) < rule.stop_entropy
        if len(before) < rule.stability_threshold:
            ends = torch.zeros_like(ends)
        for each in before:
            ends = ends & (each == likeliest).all(dim=-1)
        self._likeliest = [*before, likeliest][-rule.stability_threshold :] if rule.stability_threshold else []
        return ends

    def _accepted(self, entropy: Float[Tensor, "batch block"]) -> Bool[Tensor, "batch block"]:
        rising, order = entropy.sort(dim=-1)
        within = rising.cumsum(dim=-1) - rising <= self._bound.entropy_bound
        return torch.zeros_like(within).scatter_(-1, order, within)

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._step += 1
        return candidates.pending

    def finished(self, changed: Bool[Tensor, "batch block"]) -> Bool[Tensor, " batch"]:
        return self._done
