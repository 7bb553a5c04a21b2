"""The parts of keys and values that rows of a pass read, and the first and last column that each row reads."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.kernels.coded_rows import Heads
from tiered.models.attention import Limits, PartOutput
from tiered.models.base import DiffusionModel
from tiered.models.shape import ModelShape

C = TypeVar("C", int, Tensor)
# Columns in front of which tokens are final, of all sequences or of each.
Border = int | Int[Tensor, " batch"]


@runtime_checkable
class Part(Protocol):
    """Keys and values that rows read beside those of the canvas."""

    def attend(self, model: DiffusionModel, layer: int, rows: Rows, queries: Heads) -> Iterable[PartOutput]:
        """Attention of `rows` over the part without sinks, whole or in chunks."""
        ...


@dataclass(frozen=True, slots=True)
class CanvasLimits:
    """The columns of a canvas that rows read, by the attention pattern of their family (`ModelShape.sight`). In a layer
    with a window rows read the last of these columns.

    Attributes:
        shape: sizes of the model.
        length: columns of the canvas.
        block_length: columns of a block; 0 if rows read the whole canvas.
        positions: position of every column by sequence, ascending, if blocks begin at different columns in different
            sequences. None if they begin at the same ones.
        first: a column at which a block begins; 0 with `positions`.
        key_mask, pads: as in `Limits`.
        final: columns in front of which tokens are final.
    """

    shape: ModelShape
    length: int
    block_length: int = 0
    positions: Int[Tensor, "batch length"] | None = None
    first: int = 0
    key_mask: Bool[Tensor, "batch length"] | None = None
    pads: Int[Tensor, " batch"] | None = None
    final: Border = 0

    def of(self, sequences: slice | list[int], final: Border = 0) -> "CanvasLimits":
        """The limits of some sequences, in a pass with this border."""
        positions, key_mask, pads = (
            None if each is None else each[sequences] for each in (self.positions, self.key_mask, self.pads)
        )
        return replace(self, positions=positions, key_mask=key_mask, pads=pads, final=final)

    def of_rows(
        self, rows: Rows, batch: int, window: int | None = None, kept: slice | None = None
    ) -> list[tuple[slice, slice, Limits]]:
        """Groups of `rows` in order: their slice, the columns that they read with this `window`, and limits among these
        columns. A span is split into final rows and others, so that attention sums over a row as in a pass of either.
        Scattered rows have limits of their own, unless the host knows that they read all columns. `kept`: columns that
        have keys and values, the first of which counts as 0; None for all."""
        kept = slice(0, self.length) if kept is None else slice(kept.start, min(kept.stop, self.length))
        final, every = self.final, (slice(0, rows.count), kept)
        if isinstance(final, Tensor):
            groups = [(*every, True)]
        elif rows.is_span:
            groups = self._groups(rows.within, final, window, kept)
        else:
            groups = [(*every, self.shape.block_causal or not rows.within or rows.within[0] < final)]
        return [
            (
                some,
                slice(columns.start - kept.start, columns.stop - kept.start),
                self._limits(rows[some].index.expand(batch, -1) if by_row else None, columns, window),
            )
            for some, columns, by_row in groups
        ]

    def _groups(self, span: range, final: int, window: int | None, every: slice) -> list[tuple[slice, slice, bool]]:
        """For each group of rows: their slice, their columns, and whether some of them read fewer columns."""
        shape, apart = self.shape, final > span.start and self.shape.sight != "canvas"
        cut, groups = min(final - span.start, len(span)) if apart else 0, list[tuple[slice, slice, bool]]()
        for some, are_final in ((slice(0, cut), True), (slice(cut, len(span)), False)):
            if not (own := span[some]):
                continue
            if self.positions is not None:
                columns, by_row = every, True
            elif not shape.block_causal:
                columns, by_row = slice(0, final) if are_final else every, False
            elif are_final and shape.final_apart:
                columns, by_row = slice(_since(own.start, window), own.stop), True
            else:
                columns = slice(_since(self._begin(own.start), window), self._block_end(own.stop - 1))
                by_row = self._block_end(own.start) < columns.stop
            groups.append((some, columns, by_row))
        return groups

    def _limits(self, rows: Int[Tensor, "batch rows"] | None, columns: slice, window: int | None) -> Limits:
        """`rows`: columns of rows with limits of their own; None if all rows read all of `columns`."""
        limits = (None, None) if rows is None else (self.start(rows, window), self.stop(rows))
        pads, start, stop = (
            each if each is None or not columns.start else each - columns.start for each in (self.pads, *limits)
        )
        return Limits(None if self.key_mask is None else self.key_mask[:, columns], pads, start, stop)

    def stop(self, columns: Int[Tensor, "batch rows"]) -> Int[Tensor, "batch rows"] | None:
        """Column behind the last that each of the rows at `columns` reads; None if all read to the end."""
        shape, noise = self.shape, self.shape.sight == "noise"
        if not (shape.block_causal or (noise and (isinstance(self.final, Tensor) or self.final))):
            return None
        border = self._border(columns)
        if noise:
            return border.where(columns < border, self.length)
        ends = self._block_ends(columns)
        return (columns + 1).where(columns < border, ends) if shape.final_apart else ends

    def start(self, columns: Int[Tensor, "batch rows"], window: int | None) -> Int[Tensor, "batch rows"] | None:
        """The first column that each of these rows reads with this `window`; None if all read from the first. Rows that
        read their block to its end start at the same column, as on a canvas of DiffusionGemma."""
        if window is None:
            return None
        at = columns if self.positions is None else self.positions.gather(1, columns)
        begins = self._begin(at)
        if self.shape.final_apart:
            begins = at.where(columns < self._border(columns), begins)
        since = begins - window + 1
        return since if self.positions is None else torch.searchsorted(self.positions, since)

    def on_host(self, rows: Rows) -> list[tuple[int, int]] | None:
        """The first column that each of `rows` reads, and the column behind its last. None if only the device knows
        them, or if they differ between sequences or layers."""
        by_sequence = any(each is not None for each in (self.positions, self.key_mask, self.pads))
        if by_sequence or isinstance(self.final, Tensor) or self.shape.windows or not rows.is_span:
            return None
        bounds = list[tuple[int, int]]()
        for some, columns, limits in self.of_rows(Rows.span(rows.within.start, rows.within.stop), 1):
            stops = [columns.stop] * (some.stop - some.start)
            if limits.stop is not None:
                stops = (limits.stop[0] + columns.start).tolist()
            bounds += [(columns.start, stop) for stop in stops]
        return bounds

    def last_block(self) -> Border:
        """Number of columns in front of the last non-empty block; 0 if rows read the whole canvas."""
        if not self.block_length:
            return 0
        if self.positions is None:
            return self._begin(self.length - 1)
        return torch.searchsorted(self.positions, self._begin(self.positions[:, -1:]))[:, 0]

    def _border(self, columns: Int[Tensor, "batch rows"]) -> Int[Tensor, "#batch 1"]:
        return self.final[:, None] if isinstance(self.final, Tensor) else columns.new_full((1, 1), self.final)

    def _block_ends(self, columns: Int[Tensor, "batch rows"]) -> Int[Tensor, "batch rows"]:
        if self.positions is None:
            return (self._begin(columns) + self.block_length).clamp_(max=self.length)
        # The number of columns before the next block is its first column.
        return torch.searchsorted(self.positions, self._begin(self.positions.gather(1, columns)) + self.block_length)

    def _block_end(self, column: int) -> int:
        return min(self._begin(column) + self.block_length, self.length)

    def _begin(self, at: C) -> C:
        """The first column of a column's block, or the first position of a position's, if blocks count positions."""
        return at - (at - self.first) % self.block_length


def _since(column: int, window: int | None) -> int:
    return 0 if window is None else max(0, column - window + 1)
