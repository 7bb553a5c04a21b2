"""SVG by hand: elements with escaped text, and panels that are put into a page or side by side into one file.

Not drawn in the page by a plotting library: its script would weigh a megabyte, be evaluated from strings, and leave
nothing to see in print or without scripts; colours follow the page's scheme, and a phone gets figures of its own width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif'
_ATTRIBUTES = {"class_": "class", "view_box": "viewBox", "pattern_units": "patternUnits"}


def element(name: str, *children: str | Markup, **attributes: Any) -> Markup:
    """An element; strings are escaped, `None` leaves an attribute out, and `stroke_width` is `stroke-width`."""
    written = Markup("").join(
        Markup(' {}="{}"').format(_ATTRIBUTES.get(key, key.replace("_", "-")), _written(key, value))
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(escape(child) for child in children)
    opened = Markup("<") + Markup(name) + written
    return opened + Markup("/>") if not inside else opened + Markup(">") + inside + Markup(f"</{name}>")


def text(x: float, y: float, words: str, *, size: float = 12, fill: str = "var(--ink)", **more: Any) -> Markup:
    """Words with their baseline at `y`. `anchor`: start, middle or end."""
    anchor = more.pop("anchor", None)
    return element("text", words, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, **more)


def width_of(words: str, size: float = 12) -> float:
    """About as wide as words are, on the safe side."""
    return 0.57 * size * len(words)


def hatching() -> Markup:
    """The pattern of cells without figures."""
    line = element("path", d="M0 0V7", stroke="var(--hatch)", stroke_width=3)
    ground = element("rect", width=7, height=7, fill="var(--blank)")
    turned = {"pattern_units": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    return element("defs", element("pattern", ground, line, id="hatch", width=7, height=7, **turned))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A drawing of a size, and what it shows in words."""

    width: float
    height: float
    body: Markup
    label: str
    key: bool = False  # says what colours or shapes mean; stands on a line with its like

    def inline(self) -> Markup:
        """For a page, which has the hatching and says what the colours are."""
        return element(
            "svg",
            self.body,
            view_box=f"0 0 {_plain(self.width)} {_plain(self.height)}",
            style=f"width:{_plain(self.width)}px",
            class_="key" if self.key else None,
            role="img",
            aria_label=self.label,
        )


def side_by_side(groups: Sequence[tuple[str, Sequence[Panel]]], heading: str, most: float = 950) -> Panel:
    """Groups of panels under their titles, in rows of at most `most` pixels, under a heading, in one drawing."""
    margin, gap, line = 20.0, 14.0, 24.0
    lines = _wrapped(heading, most, 17)
    parts = [text(margin, 34 + line * number, words, size=17, font_weight=600) for number, words in enumerate(lines)]
    y = 34 + line * len(lines)
    for title, panels in groups:
        if title:
            parts.append(text(margin, y + 13, title, size=13, font_weight=600, fill="var(--soft)"))
            y += line
        x, tallest = margin, 0.0
        for number, panel in enumerate(panels):
            turns = number > 0 and panel.key != panels[number - 1].key
            if x > margin and (turns or x + panel.width > most + margin):
                x, y, tallest = margin, y + tallest + gap, 0.0
            parts.append(element("g", panel.body, transform=f"translate({_plain(x)} {_plain(y)})"))
            x, tallest = x + panel.width + gap, max(tallest, panel.height)
        y += tallest + 1.5 * gap
    return Panel(width=most + 2 * margin, height=y, body=Markup("").join(parts), label=heading)


def standalone(panel: Panel) -> str:
    """A file of its own; colours are still names."""
    size = {"width": panel.width, "height": panel.height}
    return str(
        element(
            "svg",
            element("title", panel.label),
            hatching(),
            element("rect", **size, fill="var(--card)"),
            panel.body,
            xmlns="http://www.w3.org/2000/svg",
            view_box=f"0 0 {_plain(panel.width)} {_plain(panel.height)}",
            font_family=FONT,
            **size,
        )
    )


def _wrapped(words: str, width: float, size: float) -> list[str]:
    lines, line = [], ""
    for word in words.split():
        if line and width_of(f"{line} {word}", size) > width:
            lines, line = [*lines, line], word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line]


def _written(key: str, value: Any) -> Any:
    """Data as it is, everything else in pixels."""
    return value if key.startswith("data_") else _plain(value)


def _plain(value: Any) -> Any:
    """Pixels to the hundredth."""
    return f"{round(value, 2) + 0.0:g}" if isinstance(value, float) else value
