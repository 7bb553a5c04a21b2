"""Classifier-free guidance in LLaDA's form: un + (scale + 1) · (cond − un)."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.canvas import PROMPT, Canvas
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.passes import Pass
from tiered.kernels.host_values import on_device
from tiered.models.logit_tiles import LogitTiles, with_guidance


class Guidance:
    """Adds every canvas a second time with its prompt masked, as the second half of the forward's sequences.

    A policy may leave out a sequence's second canvas in some forwards (`Pass.guided`). Such a sequence reuses its last
    difference cond − un.
    """

    def __init__(self, scale: float, mask_token_id: int) -> None:
        self.scale = scale
        self._mask_token_id = mask_token_id
        self._difference: Float[Tensor, "batch rows vocab"] | None = None
        self._first = 0  # canvas column of the difference's first row

    @spanned(Op.GUIDANCE)
    def ids(self, canvas: Canvas, guided: tuple[bool, ...] | None) -> Int[Tensor, "sequences length"]:
        tokens = canvas.tokens
        if guided is not None and not any(guided):
            return tokens
        return torch.cat([tokens, tokens.masked_fill(canvas.committed_at == PROMPT, self._mask_token_id)])

    def doubled(self, pass_: Pass, canvas: Canvas) -> Pass:
        """The pass over both halves. In the second half, rows are valid for guided sequences only."""
        ids, rows, guided = self.ids(canvas, pass_.guided), pass_.rows, pass_.guided
        if guided is None or any(guided):
            rows = rows.doubled()
        if guided is not None and any(guided):
            rows = rows.only(on_device([True] * len(guided) + [*guided], ids.device)[:, None])
        return replace(pass_, ids=ids, rows=rows)

    @spanned(Op.GUIDANCE)
    def merge(
        self,
        logits: Float[Tensor, "sequences rows vocab"] | LogitTiles,
        pass_: Pass,
        needed: tuple[int, int],
    ) -> Float[Tensor, "batch needed vocab"] | LogitTiles:
        """Guided logits of the rows `needed`. `logits`, of the output of `pass_`, is scratch space. Unless
        `Pass.guided` is None, the output is a span that may have more rows, for later forwards."""
        if isinstance(logits, LogitTiles):
            return replace(logits, scale=self.scale)
        guided, output = pass_.guided, pass_.rows[pass_.output].within
        if guided is None:
            return with_guidance(logits.chunk(2), self.scale)
        conditional = logits[: len(guided)]
        if any(guided):
            self._renew(conditional, logits[len(guided) :], guided, output.start)
        assert self._difference is not None, "the first forward is guided"
        first = needed[0] - self._first
        assert first >= 0 and needed[1] - self._first <= self._difference.shape[1], (needed, self._first)
        columns = slice(needed[0] - output.start, needed[1] - output.start)
        difference = self._difference[:, first : first + needed[1] - needed[0]]
        return conditional[:, columns].add(difference, alpha=self.scale)

    def keep(self, sequences: list[int]) -> None:
        if self._difference is not None:
            self._difference = self._difference[sequences]

    def _renew(self, conditional: Tensor, unconditional: Tensor, guided: tuple[bool, ...], first: int) -> None:
        difference = unconditional.sub_(conditional).neg_()
        if self._difference is None or self._difference.shape != difference.shape or self._first != first:
            # The rows changed, so no sequence has an earlier difference for them.
            self._difference, self._first = difference.clone(), first
            return
        chosen = [number for number, is_guided in enumerate(guided) if is_guided]
        self._difference[chosen] = difference[chosen]
