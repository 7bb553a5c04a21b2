"""From the logits of a step to the candidates of the block, whatever rows the step has computed."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.decoding.block_candidates import predicted_columns, spread
from tiered.decoding.rules.base import Candidates, CommitState
from tiered.decoding.rules.rewriting import OpenBlock, RewritingState
from tiered.decoding.sampling import propose
from tiered.decoding.sampling_options import Sampling
from tiered.decoding.sequence_noise import SequenceNoise
from tiered.models.base import DiffusionModel
from tiered.policies.base import Step


class Proposer:
    """How one call draws tokens."""

    def __init__(
        self, model: DiffusionModel, sampling: Sampling, noise: SequenceNoise, *, min_new_tokens: int = 0
    ) -> None:
        """`min_new_tokens`: tokens of an answer, from its first on, that are no end of it."""
        self._model, self._sampling, self._noise = model, sampling, noise
        self._min_new_tokens = min_new_tokens

    @spanned(Op.PROPOSE)
    def candidates(
        self,
        rule: CommitState,
        step: Step,
        logits: Float[Tensor, "batch rows vocab"],
        output: Rows,
        pending: Bool[Tensor, "batch block"],
        remaining: list[int],
    ) -> Candidates:
        """Candidates of the block; whether their logits are finite stays on the device with them.

        Args:
            rule: proposes by itself where it rewrites tokens.
            step: where the loop stands.
            logits: of the rows `output`; scratch space.
            output: rows that the step has logits of.
            pending, remaining: open columns of the block, and how many there are, by sequence.
        """
        predicted = predicted_columns(output, self._model.shape.prediction_shift, step.start, step.stop)
        tokens, columns = step.canvas.tokens[:, step.start : step.stop], None
        if predicted is not None:
            columns, valid = predicted
            tokens, pending = tokens.gather(1, columns), pending.gather(1, columns) & valid
            if self._sampling.by_row or isinstance(rule, RewritingState):
                remaining = pending.sum(dim=1).tolist()
        # Before anything is ruled out. The largest is NaN where any is, and infinite where the row says nothing.
        broken = (~logits.amax(dim=-1).isfinite() & pending).any(dim=1)
        self._keep_open(step, logits, columns)
        if isinstance(rule, RewritingState):
            assert self._model.noise is not None, "the runtime refuses the rule for other models"
            logits[..., self._model.mask_token_id] = -torch.inf
            found = rule.propose(
                OpenBlock(
                    logits=logits, tokens=tokens, pending=pending, remaining=remaining,
                    process=self._model.noise, sampling=self._sampling, noise=self._noise,
                )
            )  # fmt: skip
        else:
            found = propose(
                logits,
                pending,
                mask_token_id=self._model.mask_token_id,
                sampling=self._sampling,
                noise=self._noise,
                remaining=remaining,
            )
        found = replace(found, broken=broken)
        return found if predicted is None else spread(found, *predicted, step.stop - step.start)

    def _keep_open(self, step: Step, logits: Float[Tensor, "batch rows vocab"], columns: Tensor | None) -> None:
        """Let no answer end before its least length; `columns`: of the block, by row; None: all in order."""
        short = self._min_new_tokens - (step.start - step.canvas.prompt_length)
        if short <= 0:
            return
        if columns is None:
            columns = torch.arange(step.stop - step.start, device=logits.device)[None]
        logits[..., self._model.eos_token_id].masked_fill_(columns < short, -torch.inf)
