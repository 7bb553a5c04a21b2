"""The shade is the KL divergence, in nats, of a centroid's attention from that at its last update, on average over
clusters. Forwards without an update have no cell."""

from collections.abc import Sequence
from typing import Any

from charts.grid import grid, steps
from charts.rows import Row, good, panels, shown
from charts.theme import alt, side_by_side

COLUMNS = ("call", "forward", "layer", "mean", "largest")


def table(rows: Sequence[Row]) -> list[Row]:
    """Rows about drift."""
    return [row for row in good(rows) if row.get("about") == "drift"]


def chart(rows: Sequence[Row], width: int) -> alt.TopLevelMixin:
    """A map of layer and forward for every call that measures drift."""
    above = [row["mean"] for row in rows if row["mean"] > 0] or [1.0]
    begins = steps(above, by_ratio=max(above) > 30 * min(above))
    bare = alt.Axis(domain=False, ticks=False, labelAngle=0, labelOverlap="greedy")
    x, y = alt.X("forward:O", axis=bare), alt.Y("layer:O", axis=bare)

    def draw(own: Sequence[Row], inner: int) -> Any:
        height = min(320, 22 * len({row["layer"] for row in own}))
        return grid(own, x, y, "mean", begins, lambda row: "", width).properties(width=inner, height=height)

    return side_by_side(panels(rows, ("call",)), width, draw, margin=52, least=420)


def says(rows: Sequence[Row]) -> str:
    """The layers that drift most and least, on average over all updates."""
    layers: dict[int, list[float]] = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(row["mean"])
    ranked = sorted((sum(values) / len(values), layer) for layer, values in layers.items())
    (least, still), (most, moving) = ranked[0], ranked[-1]
    return f"Layer {moving} drifts most, {shown('mean', most)} on average; layer {still} least, {shown('mean', least)}"
