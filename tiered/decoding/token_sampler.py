"""From the logits of a step's rows, which may be any, to the candidates of the block."""

from copy import copy
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.rules.base import Candidates, CommitState
from tiered.decoding.rules.rewriting import RewritingState
from tiered.decoding.sampling import propose
from tiered.decoding.sampling_options import Sampling
from tiered.models.base import DiffusionModel
from tiered.models.logit_tiles import LogitTiles
from tiered.policies.base import Step


class TokenSampler:
    """Draws the tokens of one call, and their ranks if these are random."""

    def __init__(
        self,
        model: DiffusionModel,
        sampling: Sampling,
        streams: Generators,
        *,
        min_new_tokens: int,
        ends: tuple[int, ...],
    ) -> None:
        """`min_new_tokens`: number of first tokens of an answer that cannot be one of `ends`."""
        self._model, self._sampling, self._streams = model, sampling, streams
        self._min_new_tokens, self._ends = min_new_tokens, ends
        self._scores: Float[Tensor, "batch block"] | None = None

    def draw_ranks(
        self, rule: CommitState, step: Step, pending: Bool[Tensor, "batch block"]
    ) -> Int[Tensor, "batch block"] | None:
        """`Step.next_commits` of `step` by random ranks; None if confidence ranks the candidates."""
        if not self._sampling.random_ranks:
            return None
        canvas = step.canvas
        scores = self._streams.confidence(canvas.stops, canvas.pad_counts, step.start, step.stop, list(step.active))
        self._scores = scores.masked_fill(~pending, -torch.inf)
        tokens = canvas.tokens[:, step.start : step.stop]
        ahead = Candidates(tokens=tokens, confidence=self._scores, pending=pending)
        # A copy of the rule looks ahead, because the rule's count of steps must advance with the real choice only.
        return copy(rule).choose(ahead) * (ahead.ranks() + 1)

    @spanned(Op.PROPOSE)
    def candidates(
        self,
        rule: CommitState,
        step: Step,
        logits: "Float[Tensor, 'batch rows vocab'] | LogitTiles",
        output: Rows,
        pending: Bool[Tensor, "batch block"],
        remaining: list[int],
    ) -> Candidates:
        """Candidates of the block.

        Args:
            rule: the commit rule, which makes the proposals if it rewrites tokens.
            logits: logits of the rows `output`; scratch space.
            pending, remaining: open columns of the block, and their number in each sequence.
        """
        predicted = _predicted_columns(output, self._model.shape.prediction_shift, step.start, step.stop)
        tokens, columns = step.canvas.tokens[:, step.start : step.stop], None
        rewriting = rule if isinstance(rule, RewritingState) else None
        if predicted is not None:
            columns, valid = predicted
            tokens, pending = tokens.gather(1, columns), pending.gather(1, columns) & valid
            tiled = isinstance(logits, LogitTiles) and not self._sampling.plain
            if self._sampling.by_row or rewriting or tiled:
                remaining = pending.sum(dim=1).tolist()
        block = OpenBlock(
            logits=logits,
            tokens=tokens,
            pending=pending,
            remaining=remaining,
            sampling=self._sampling,
            streams=self._streams,
            mask_token_id=self._model.mask_token_id,
            process=self._model.noise,
            barred=() if rewriting is None or rewriting.weighs_masks else (self._model.mask_token_id,),
            ends=self._ends,
            early=self._early(step, tokens, columns),
        )
        found = propose(block) if rewriting is None else rewriting.propose(block)
        if predicted is not None:
            found = _spread(found, *predicted, step.stop - step.start)
        if self._scores is not None:
            found = replace(found, confidence=self._scores.masked_fill(~found.pending, -torch.inf))
        return found

    def keep(self, sequences: list[int]) -> None:
        self._streams.keep(sequences)

    def _early(self, step: Step, tokens: Tensor, columns: Tensor | None) -> Bool[Tensor, "batch rows"] | None:
        """True for rows of the first `min_new_tokens` of an answer; None if there are none."""
        short = self._min_new_tokens - (step.start - step.canvas.prompt_length)
        if short + max(step.canvas.tail_counts) <= 0:
            return None
        bound = short if step.canvas.tails is None else step.canvas.tails[:, None] + short
        if columns is None:
            columns = torch.arange(step.stop - step.start, device=tokens.device)[None]
        return (columns < bound).expand(tokens.shape)


def _predicted_columns(
    output: Rows, shift: int, start: int, stop: int
) -> tuple[Int[Tensor, "batch rows"], Bool[Tensor, "batch rows"]] | None:
    """The block's column (0 for `start`) that each row of `output` predicts, and False for filler rows and rows of
    waiting sequences. None for a span, which is the whole block."""
    if output.is_span:
        return None
    columns = output.index + (shift - start)
    inside = (columns >= 0) & (columns < stop - start)
    valid = inside if output.valid is None else inside & output.valid
    return columns.where(valid, 0), valid


def _spread(
    candidates: Candidates, columns: Int[Tensor, "batch rows"], valid: Bool[Tensor, "batch rows"], block: int
) -> Candidates:
    """Spread `candidates` of rows that predict `columns` over the block's `block` columns. Columns without a valid row
    are not pending."""
    batch = len(columns)
    # One more column receives the invalid rows.
    place = columns.where(valid, block)

    def scattered(values: Tensor, fill: float | int | bool) -> Tensor:
        full = torch.full((batch, block + 1), fill, dtype=values.dtype, device=values.device)
        return full.scatter_(1, place, values)[:, :block]

    return replace(
        candidates,
        tokens=scattered(candidates.tokens, 0),
        confidence=scattered(candidates.confidence, -torch.inf),
        pending=scattered(candidates.pending, False),
    )
