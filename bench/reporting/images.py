"""PNG and SVG of a figure, for pages such as README.md: light, with all their colours inside."""

from reporting.colours import resolved, variables
from reporting.figure import Figure
from reporting.svg import side_by_side, standalone
from reporting.wording import without_marks
from tiered.core.extras import Extra

with Extra("bench"):
    import vl_convert


def images(figure: Figure, scale: float = 2.0) -> dict[str, bytes]:
    """Files by name; `scale`: pixels of the PNG to one of the drawing."""
    groups = [(group.title, group.panels) for group in figure.groups if group.open]
    svg = resolved(standalone(side_by_side(groups, without_marks(figure.headline))), variables(dark=False))
    return {f"{figure.name}.svg": svg.encode(), f"{figure.name}.png": vl_convert.svg_to_png(svg, scale=scale)}
