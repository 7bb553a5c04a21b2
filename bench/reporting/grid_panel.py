"""A grid of cells, each with a shade and its figure: one value of M, over C and T."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from reporting.colours import STEPS, shade
from reporting.svg import Panel, element, text, width_of

WIDTH, CELL = 304.0, 36.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """A cell.

    Attributes:
        shown: in it; "" for nothing.
        below: smaller, under it.
        share: its place on the ramp, 0 to 1; None: hatched, there is no figure.
        tip: what pointing at it says.
        value: the figure.
    """

    shown: str
    tip: str
    below: str = ""
    share: float | None = None
    value: float | None = None


def grid_panel(
    *,
    title: str,
    label: str,
    columns: Sequence[Any],
    rows: Sequence[Any],
    names: tuple[str, str],
    square: Callable[[Any, Any], Square | None],
    ramp: str,
) -> Panel:
    """Cells by row and column; `names`: of columns and rows. `square` of None: nothing was asked for."""
    left, top = 34.0 + max(width_of(str(row), 12) for row in rows), 30.0
    step = (WIDTH - left) / len(columns)
    parts = [
        text(left, 14, title, size=13, font_weight=600),
        text(0, top + len(rows) * CELL / 2 + 4, names[1], size=12, fill="var(--soft)"),
        text(left + (WIDTH - left) / 2, top + len(rows) * CELL + 34, names[0], fill="var(--soft)", anchor="middle"),
    ]
    for number, column in enumerate(columns):
        parts.append(text(left + (number + 0.5) * step, top + len(rows) * CELL + 16, str(column), anchor="middle"))
    for down, row in enumerate(rows):
        y = top + down * CELL
        parts.append(text(left - 8, y + CELL / 2 + 4, str(row), anchor="end"))
        for across, column in enumerate(columns):
            parts.append(_cell(square(column, row), left + across * step, y, step, ramp))
    height = top + len(rows) * CELL + 40
    return Panel(width=WIDTH, height=height, body=Markup("").join(parts), label=label)


def _cell(square: Square | None, x: float, y: float, width: float, ramp: str) -> Markup:
    box = {"x": x + 1.5, "y": y + 1.5, "width": width - 3, "height": CELL - 3, "rx": 3}
    if square is None:
        return element("rect", **box, fill="none", stroke="var(--line)", stroke_dasharray="2 3")
    paint, ink = ("url(#hatch)", "var(--ink)") if square.share is None else shade(ramp, square.share)
    middle = {"anchor": "middle", "fill": ink}
    size = min(12.0, (width - 8) / max(1, width_of(square.shown, 1)))
    lines = [text(x + width / 2, y + CELL / 2 + (-1 if square.below else 4), square.shown, size=size, **middle)]
    if square.share is None and square.shown:
        plate = width_of(square.shown, size) + 4
        back = {"x": x + (width - plate) / 2, "y": y + CELL / 2 - 8, "width": plate, "height": 16, "rx": 2}
        lines.insert(0, element("rect", **back, fill="var(--card)", opacity=0.85))
    if square.below:
        lines.append(text(x + width / 2, y + CELL / 2 + 12, square.below, size=9.5, opacity=0.85, **middle))
    return element(
        "g", element("rect", **box, fill=paint), *lines, class_="mark", data_tip=square.tip, data_value=square.value
    )


def ramp_panel(ramp: str, ends: tuple[str, str], noun: str) -> Panel:
    """What shades mean."""
    step, y = 10.0, 4.0
    start = width_of(ends[0], 11) + 6 + width_of(noun, 11) + 8
    parts = [
        text(0, y + 10, noun, size=11, fill="var(--soft)"),
        text(start - 6, y + 10, ends[0], size=11, anchor="end"),
    ]
    for number in range(STEPS):
        paint, _ = shade(ramp, number / (STEPS - 1))
        parts.append(element("rect", x=start + number * step, y=y, width=step + 0.5, height=12, fill=paint))
    x = start + STEPS * step + 6
    parts.append(text(x, y + 10, ends[1], size=11))
    label = f"shades: {noun}, {ends[0]} to {ends[1]}"
    return Panel(width=x + width_of(ends[1], 11) + 16, height=20, body=Markup("").join(parts), label=label, key=True)


def hatch_panel(words: str) -> Panel:
    """What hatched cells are."""
    box = element("rect", x=0.5, y=4, width=18, height=12, rx=2, fill="url(#hatch)")
    return Panel(
        width=28 + width_of(words, 11),
        height=20,
        body=box + text(24, 14, words, size=11),
        label=f"hatched: {words}",
        key=True,
    )
