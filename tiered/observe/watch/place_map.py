"""All columns of a canvas in a line or a few: a cell for every few columns, by where most of them are."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int8
from rich.text import Text

from tiered.core.features import Place
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.looks import PLACES, Pen

_BORDERS = ("", "|", "[", "]")
# In the order of `PLACES`: of equally many, and of several that are true of one column, the first counts.
_ORDER = tuple(PLACES)


def main_place(places: int) -> Place:
    """Of several places that are true of a column the one that is shown."""
    return next((place for place in _ORDER if places & place), Place.DEVICE)


def columns_per_cell(frame: Frame, cells: int) -> int:
    """How many columns a cell stands for where a map has `cells`, borders included."""
    parts = [stop - first for first, stop in _parts(frame)]
    per_cell = 1
    while sum(-(-part // per_cell) for part in parts) + len(_BORDERS) > cells and per_cell < max(parts):
        per_cell += 1
    return per_cell


def place_map(frame: Frame, sequence: int, per_cell: int, width: int, pen: Pen) -> list[Text]:
    """`prompt|finished[block]future` of one sequence, in lines of `width` cells."""
    line = Text(no_wrap=True)
    for border, (first, stop) in zip(_BORDERS, _parts(frame), strict=True):
        line.append(border)
        places = frame.places[sequence, first:stop]
        blank = np.isin(frame.states[sequence, first:stop], (State.PAD, State.END))
        for cell in _cells(len(places), per_cell):
            look = PLACES[_of_most(places[cell])]
            line.append(" " if blank[cell].all() else pen.glyph(look), look.style)
    return [line[start : start + width] for start in range(0, len(line), width)]


def _of_most(places: Int8[np.ndarray, " columns"]) -> Place:
    shown = [main_place(of_column) for of_column in places.tolist()]
    return max(_ORDER, key=shown.count)


def _parts(frame: Frame) -> list[tuple[int, int]]:
    """Prompt, finished blocks, the current block, and what is behind it."""
    prompt, length = frame.answer[0], frame.tokens.shape[1]
    start, stop = frame.span
    return [(0, prompt), (prompt, start), (start, stop), (stop, length)]


def _cells(columns: int, per_cell: int) -> Iterator[slice]:
    for first in range(0, columns, per_cell):
        yield slice(first, min(first + per_cell, columns))
