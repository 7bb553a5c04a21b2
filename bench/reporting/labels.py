"""Names beside marks, where they cover neither marks nor one another; a name without room is left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reporting.svg import text, width_of

Box = tuple[float, float, float, float]  # left, top, width, height
SIZE = 11.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A name of the mark at (`x`, `y`)."""

    x: float
    y: float
    words: str
    strong: bool = False


def placed(labels: Iterable[Label], taken: Sequence[Box], bounds: Box) -> list[Markup]:
    """Labels in the order of their importance; `taken`: what none may cover. `bounds`: left, top, right, bottom."""
    boxes, drawn = list(taken), []
    for label in labels:
        wide = width_of(label.words, SIZE) * (1.1 if label.strong else 1.0)
        for left, top in _places(label, wide):
            box = (left, top, wide, SIZE + 2)
            if _inside(box, bounds) and not any(_overlap(box, other) for other in boxes):
                boxes.append(box)
                weight = 600 if label.strong else None
                halo = {"stroke": "var(--card)", "stroke_width": 3, "paint_order": "stroke", "stroke_linejoin": "round"}
                drawn.append(text(left, top + SIZE - 1, label.words, size=SIZE, font_weight=weight, **halo))
                break
    return drawn


def _places(label: Label, wide: float) -> list[tuple[float, float]]:
    x, y, half = label.x, label.y, SIZE / 2 + 1
    near = [(x + 10, y - half), (x - 10 - wide, y - half), (x - wide / 2, y - 22), (x - wide / 2, y + 9)]
    corners = [(x + 8, y - 21), (x + 8, y + 8), (x - 8 - wide, y - 21), (x - 8 - wide, y + 8)]
    return near + corners


def _inside(box: Box, bounds: Box) -> bool:
    return box[0] >= bounds[0] and box[1] >= bounds[1] and box[0] + box[2] <= bounds[2] and box[1] + box[3] <= bounds[3]


def _overlap(one: Box, other: Box) -> bool:
    return (
        one[0] < other[0] + other[2]
        and other[0] < one[0] + one[2]
        and one[1] < other[1] + other[3]
        and other[1] < one[1] + one[3]
    )
