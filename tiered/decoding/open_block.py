"""A step's view of the block: its rows, and their logits, whole or some at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates
from tiered.decoding.sampling_options import GREEDY, Sampling
from tiered.models import shape
from tiered.models.logit_tiles import LogitTiles
from tiered.models.noise import Noise


@dataclass(slots=True, kw_only=True)
class OpenBlock:
    """A step's view of the block.

    Attributes:
        logits: logits of the rows that the step computed; scratch space.
        tokens: tokens of these rows on the canvas.
        pending: True for rows that may be fixed or rewritten.
        remaining: number of pending rows by sequence, 0 if it waits; used with `sampling.by_row`, by rules that
            rewrite, and by `by_rows`.
        barred: tokens that no row may have.
        early: True for rows that may not have one of `ends`; None for no row.
        streams: random streams.
        process: noise process of the model's training; None for masks alone, and for random tokens.
        sequence: the batch's number of the first sequence here, for its stream.
        names: numbers of the rows in the block, for `streams`; None for 0, 1, 2 and so on.
        peak: largest logit of each row before any was changed; NaN if one of them is. 0 in rows not looked at, None
            before any was.
    """

    logits: Float[Tensor, "batch rows vocab"] | LogitTiles
    tokens: Int[Tensor, "batch rows"]
    pending: Bool[Tensor, "batch rows"]
    remaining: list[int]
    mask_token_id: int
    streams: Generators
    sampling: Sampling = GREEDY
    process: Noise | None = None
    barred: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    early: Bool[Tensor, "batch rows"] | None = None
    sequence: int = 0
    names: Int[Tensor, " rows"] | None = None
    peak: Float32[Tensor, "batch rows"] | None = field(init=False, default=None)

    @property
    def top(self) -> Float32[Tensor, "batch rows"]:
        assert self.peak is not None, "logits were looked at"
        return self.peak

    @property
    def whole(self) -> Float[Tensor, "batch rows vocab"]:
        assert isinstance(self.logits, Tensor), "logits in tiles are read by `by_rows` or `by_tokens`"
        return self.logits

    def pending_rows(self) -> list[Int[Tensor, " _"]]:
        """The pending rows of each sequence, in order."""
        pending_first = self.pending.int().argsort(dim=1, descending=True, stable=True)
        return [pending_first[i, :count] for i, count in enumerate(self.remaining)]

    def by_rows(self, make: Callable[["OpenBlock"], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The results of `make`, by row. It gets a block with whole logits: this one, or from tiles some pending rows
        of a sequence at a time, in order. Rows that are not pending may be left 0."""
        if isinstance(self.logits, Tensor):
            self._bar(self.logits, slice(0, self.logits.shape[-1]))
            return make(self)
        found: tuple[Tensor, ...] = ()
        peak = torch.zeros_like(self.tokens, dtype=torch.float32)
        halves = 1 if self.logits.scale is None else 2
        at_once = shape.rows_at_once(halves * self.logits.vocab_size)
        for sequence, rows in enumerate(self.pending_rows()):
            for some in rows.split(at_once) if len(rows) else ():
                block = self._of_rows(sequence, some)
                made = make(block)
                peak[sequence, some] = block.top[0]
                del block  # freed before the next rows' logits are made
                found = found or tuple(each.new_zeros(self.tokens.shape) for each in made)
                for every, part in zip(found, made, strict=True):
                    every[sequence, some] = part[0]
        self.peak = peak
        return found

    def by_tokens(self, count: int) -> Iterator[tuple[slice, Float[Tensor, "batch rows tile"]]]:
        """Logits in tiles, of all rows and of `count` tokens at a time, with their tokens."""
        assert isinstance(self.logits, LogitTiles), "whole logits are read as they are"
        for tokens, logits in self.logits.by_tokens(count):
            self._bar(logits, tokens)
            yield tokens, logits
            del logits  # freed before the next tile is made

    def candidates(self, tokens: Tensor, confidence: Tensor) -> Candidates:
        """Candidates of the rows. Rows that are not pending rank last."""
        confidence = confidence.double().where(self.pending, -torch.inf)
        broken = ((self.top - self.top != 0) & self.pending).any(dim=1)  # infinity less itself is NaN
        return Candidates(tokens=tokens, confidence=confidence, pending=self.pending, broken=broken)

    def _of_rows(self, sequence: int, rows: Int[Tensor, " rows"]) -> "OpenBlock":
        assert isinstance(self.logits, LogitTiles), "made of tiles"
        some = replace(
            self,
            logits=(logits := self.logits.of_rows(sequence, rows)),
            tokens=self.tokens[sequence, rows][None],
            pending=self.pending[sequence, rows][None],
            early=None if self.early is None else self.early[sequence, rows][None],
            remaining=[len(rows)],
            sequence=sequence,
            names=rows,
        )
        some._bar(logits, slice(0, logits.shape[-1]))
        return some

    def _bar(self, logits: Float[Tensor, "batch rows tokens"], tokens: slice) -> None:
        """Set logits that rows may not have to −∞. Before that a row's maximum is noted: it is NaN if any logit is, and
        infinite if the row is useless."""
        first = tokens.start
        top = logits.amax(dim=-1)
        self.peak = top if self.peak is None else torch.maximum(self.peak, top)
        for token in self.barred:
            if first <= token < tokens.stop:
                logits[..., token - first] = -torch.inf
        if self.early is not None:
            for end in self.ends:
                if first <= end < tokens.stop:
                    logits[..., end - first].masked_fill_(self.early, -torch.inf)
