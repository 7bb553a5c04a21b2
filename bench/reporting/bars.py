"""Panels of horizontal bars: parts of a whole, one bar a line."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reporting.scales import Scale
from reporting.svg import Panel, element, text, width_of

LINE = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A line. `parts`: figure and paint of each piece, from the left; `shown`: behind it; `tip`: when pointed at."""

    name: str
    parts: Sequence[tuple[float, str]]
    shown: str
    tip: str


def bar_panel(title: str, bars: Sequence[Bar], *, width: float, most: float, label: str, beneath: str = "") -> Panel:
    """Bars on one scale of 0 to `most`. `beneath`: a line under the title."""
    left = 12 + max((width_of(bar.name, 12) for bar in bars), default=0)
    room = 10 + max((width_of(bar.shown, 11) for bar in bars), default=0)
    x = Scale(low=0, high=most or 1, start=left, stop=max(left + 40, width - room))
    parts = [text(0, 14, title, size=13, font_weight=600)]
    top = 26.0
    if beneath:
        parts.append(text(0, 31, beneath, size=11.5, fill="var(--soft)"))
        top = 42.0
    for number, bar in enumerate(bars):
        y = top + LINE * number
        pieces, start = [], 0.0
        for size, paint in bar.parts:
            # A part that is there is seen, however small.
            wide = max(x(start + size) - x(start), 1.0) if size else 0.0
            pieces.append(element("rect", x=x(start), y=y + 3, width=wide, height=LINE - 8, fill=paint))
            start += size
        end = max(x(start), left) + 7
        parts.append(text(left - 8, y + 16, bar.name, anchor="end"))
        parts.append(
            element(
                "g",
                *pieces,
                text(end, y + 16, bar.shown, size=11, fill="var(--soft)"),
                class_="mark",
                data_tip=bar.tip,
                data_value=start,
            )
        )
    bottom = top + LINE * len(bars)
    parts.append(element("path", d=f"M{left:.1f} {top:g}V{bottom:g}", stroke="var(--line)"))
    return Panel(width=width, height=bottom + 8, body=Markup("").join(parts), label=label)


def keys_panel(keys: Sequence[tuple[str, str]]) -> Panel:
    """What paints mean."""
    parts, place = [], 0.0
    for paint, words in keys:
        parts.append(element("rect", x=place, y=4, width=11, height=11, rx=2, fill=paint))
        parts.append(text(place + 17, 14, words, size=11))
        place += 36 + width_of(words, 11)
    label = ", ".join(words for _, words in keys)
    return Panel(width=max(place, 1.0), height=20, body=Markup("").join(parts), label=label, key=True)
