"""Which points a filter takes: `policy=polestar,update_threshold=0|1`."""

from collections.abc import Sequence
from typing import Any

from sweeping.axes import AXES, parse_value, same
from sweeping.point import Point
from tiered.core.checks import unknown_name


def filtered(points: Sequence[Point], expression: str) -> list[Point]:
    """The points for which every part of the comma-separated `expression` holds: `axis=value|value`, or
    `axis!=value|value` for those of other values. A policy that lacks an axis has the value `none` there.

    Raises:
        ValueError: what is no such expression, an axis or value that no point has, or a filter that leaves nothing.
    """
    places = [point.axis_values() for point in points]
    chosen = list(range(len(points)))
    for part in expression.split(","):
        name, equals, text = part.partition("=")
        unlike = name.endswith("!")
        axis = name.removesuffix("!").strip()
        if not equals:
            raise ValueError(f"{part.strip()!r}; allowed: AXIS=VALUE|VALUE or AXIS!=VALUE, with commas between them")
        if axis not in AXES:
            raise unknown_name("axis", axis, AXES)
        there = list(dict.fromkeys(place[axis] for place in places))
        values = [_value(axis, value, there) for value in text.split("|")]
        chosen = [number for number in chosen if (places[number][axis] in values) != unlike]
    if not chosen:
        raise ValueError(f"{expression!r} leaves no point of {len(points)}")
    return [points[number] for number in chosen]


def _value(axis: str, text: str, there: list[Any]) -> Any:
    """The one of the values `there` that `text` stands for."""
    text = text.strip()
    try:
        wanted = None if text.lower() == "none" and axis != "policy" else parse_value(axis, text)
    except ValueError:
        wanted = text  # no value of the axis, so none of those there
    for value in there:
        if same(axis, value, wanted):
            return value
    shown = ", ".join("none" if value is None else str(value) for value in there)
    raise ValueError(f"{axis} = {text!r}; allowed: {shown}")
