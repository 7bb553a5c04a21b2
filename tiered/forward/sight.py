"""What rows see of the columns that are stored, by the way that their family looks (`ModelShape.sight`)."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.models.shape import ModelShape

C = TypeVar("C", int, Tensor)
Clean = int | Int[Tensor, " batch"]  # columns in front of which tokens are final, of all sequences or of each


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows that end with one column, or that have an end each.

    Attributes:
        rows: by their place among those that were asked about.
        stop: behind the last column that any of them sees.
        start: the first that any of them sees.
        by_row: whether some see less.
    """

    rows: slice
    stop: int
    start: int = 0
    by_row: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """The columns that rows of one canvas see: the first ones, in a layer with a window the last of those.

    Attributes:
        shape: of the model.
        length: columns of the canvas.
        block_length: columns of a block; None where rows see the whole canvas.
        positions: of every column by sequence, ascending, where blocks begin in other columns of each; None: they begin
            in those of `first`.
        first: a column that a block begins with; 0 where `positions` say it.
    """

    shape: ModelShape
    length: int
    block_length: int | None = None
    positions: Int[Tensor, "batch length"] | None = None
    first: int = 0

    def of_rows(self, rows: Rows, clean: Clean, window: int | None = None) -> list[Seen]:
        """What `rows` see, in order, in a layer with so wide a window. A span falls into rows that see the same columns
        and rows with limits of their own. Scattered rows have limits of their own, unless the host knows that they see
        all columns."""
        if rows.start is not None and not isinstance(clean, Tensor):
            return self._of_span(rows.start, rows.start + rows.count, clean, window)
        final = isinstance(clean, Tensor) or (clean and (rows.within is None or rows.within[0] < clean))
        return [Seen(slice(0, rows.count), self.length, by_row=self.shape.block_causal or bool(final))]

    def _of_span(self, start: int, stop: int, clean: int, window: int | None) -> list[Seen]:
        every, cut = slice(0, stop - start), min(max(clean - start, 0), stop - start)
        apart = self.shape.noise_masked or self.shape.sight == "context"
        final, others = slice(0, cut), slice(cut, stop - start) if apart else every
        if self.positions is not None and self.shape.block_causal:
            return [Seen(every, self.length, by_row=True)]
        if self.shape.block_causal:
            first, end = start + others.start, self._block_end(stop - 1)
            front = Seen(final, start + cut, _since(start, window), by_row=True)
            behind = Seen(others, end, _since(self._begin(first), window), by_row=self._block_end(first) < end)
        else:
            front, behind = Seen(final, clean), Seen(others, self.length)
        parts = [front, behind] if apart else [behind]
        return [part for part in parts if part.rows.start < part.rows.stop]

    def visible(self, columns: Int[Tensor, "batch rows"], clean: Clean) -> Int[Tensor, "batch rows"] | None:
        """How many columns the rows at `columns` of the first sequences see; None: all of them."""
        shape = self.shape
        if not (shape.block_causal or (shape.noise_masked and (isinstance(clean, Tensor) or clean))):
            return None
        border = _border(columns, clean)
        if not shape.block_causal:
            return border.where(columns < border, self.length)
        ends = self._block_ends(columns)
        return (columns + 1).where(columns < border, ends) if shape.sight == "context" else ends

    def since(
        self, columns: Int[Tensor, "batch rows"], clean: Clean, window: int | None
    ) -> Int[Tensor, "batch rows"] | None:
        """The first column that each of these rows sees in a layer with so wide a window; None: the first of all. Rows
        that see their block to its end all begin with the same column, as those of a canvas of DiffusionGemma do."""
        if window is None:
            return None
        at = columns if self.positions is None else self.positions[: len(columns)].gather(1, columns)
        begins = self._begin(at)
        if self.shape.sight == "context":
            begins = at.where(columns < _border(columns, clean), begins)
        since = begins - window + 1
        return since if self.positions is None else torch.searchsorted(self.positions[: len(columns)], since)

    def limits(
        self, columns: Int[Tensor, "batch rows"], clean: Clean, window: int | None
    ) -> tuple[Int[Tensor, "batch rows"] | None, Int[Tensor, "batch rows"] | None]:
        """Both: where what each of these rows sees ends, and where it begins."""
        return self.visible(columns, clean), self.since(columns, clean, window)

    def last_block(self) -> Clean:
        """How many columns stand in front of the last block that has any; 0 where rows see the whole canvas."""
        if self.block_length is None:
            return 0
        if self.positions is None:
            return self._begin(self.length - 1)
        return torch.searchsorted(self.positions, self._begin(self.positions[:, -1:]))[:, 0]

    def _block_ends(self, columns: Int[Tensor, "batch rows"]) -> Int[Tensor, "batch rows"]:
        if self.positions is None:
            return (self._begin(columns) + self._block).clamp_(max=self.length)
        positions = self.positions[: len(columns)]
        # The first column of the next block is as many columns in.
        return torch.searchsorted(positions, self._begin(positions.gather(1, columns)) + self._block)

    def _block_end(self, column: int) -> int:
        return min(self._begin(column) + self._block, self.length)

    def _begin(self, at: C) -> C:
        """What the block of a column begins with, or that of a position, where blocks count by those."""
        return at - (at - self.first) % self._block

    @property
    def _block(self) -> int:
        assert self.block_length is not None, "blocks have a length"
        return self.block_length


def _border(columns: Int[Tensor, "batch rows"], clean: Clean) -> Int[Tensor, "#batch 1"]:
    """`clean`, beside each row of `columns`."""
    return clean[: len(columns), None] if isinstance(clean, Tensor) else columns.new_full((1, 1), clean)


def _since(column: int, window: int | None) -> int:
    return 0 if window is None else max(0, column - window + 1)
