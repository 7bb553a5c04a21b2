"""Areas of the canvas beside the block that is denoised, and the figures of each area at each step of a call."""

import itertools
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tiered.models.shape import ModelShape


class Area(StrEnum):
    """A column's place relative to the current block. The areas cover every column once."""

    PROMPT = "prompt"
    PAST = "past"  # finished blocks before the previous one
    PREVIOUS = "previous"  # the block before the current one
    CURRENT = "current"
    NEXT = "next"  # the block behind the current one
    FUTURE = "future"  # everything behind the next block


# Attention falls on columns, and on `sinks`, which are learned tokens without a column. `trailing` columns are noise
# behind the answer, which no step denoises.
COLUMNS: tuple[str, ...] = (*(area.value for area in Area), "trailing")
MASSES: tuple[str, ...] = (*COLUMNS, "sinks")


def area_spans(prompt_length: int, start: int, stop: int, length: int) -> dict[Area, tuple[int, int]]:
    """First column of every area and the column behind its last; equal if the area has no column.

    `start` and `stop` are the columns of the current block, `prompt_length` those of the prompt with its padding, and
    `length` those of the canvas.
    """
    before, behind = max(prompt_length, 2 * start - stop), min(length, 2 * stop - start)
    edges = (0, prompt_length, before, start, stop, behind, length)
    return dict(zip(Area, itertools.pairwise(edges), strict=True))


def check_canvas(shape: ModelShape) -> None:
    """Raise `ValueError` if rows see blocks: areas are those of a canvas that every row sees."""
    if shape.block_causal:
        raise ValueError(
            f"areas are compared in families whose rows see the whole canvas; rows of {shape.family!r} see blocks, "
            "whose keys and values never change once they are finished"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AreaFigures:
    """Figures of a call's steps; arrays are [steps, layers, areas] if nothing else is said.

    Attributes:
        keys, values: cosine distances (1 - cos), the mean over heads, rows and sequences; NaN without rows.
        rows: rows behind each distance, [steps, areas].
        blocks: block of every step.
        numbers: number of every step in its block.
        attention: shares of the current block's attention, [steps, layers, `MASSES`]; None if it was not measured.
    """

    keys: NDArray[np.floating]
    values: NDArray[np.floating]
    rows: NDArray[np.int64]
    blocks: list[int]
    numbers: list[int]
    attention: NDArray[np.floating] | None = None

    def by_layer(self, distances: NDArray[np.floating]) -> NDArray[np.floating]:
        """The mean of `keys` or `values` over the steps that have a figure, [layers, areas]; NaN if none has one. Each
        step counts the same."""
        there = self.rows > 0
        if self.attention is not None:  # distances to the step before, which a block's first step lacks
            there &= (np.array(self.numbers) > 0)[:, None]
        # Not nanmean: NaN in a cache must show.
        with np.errstate(invalid="ignore"):
            return np.where(there[:, None], distances, 0).sum(axis=0) / there.sum(axis=0)
