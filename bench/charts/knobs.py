"""A cell is a setting; the stronger its shade, the higher its figure, over all tasks. C: clusters of a layer; M:
clusters that an update renews; T: commits that call for no update."""

from collections.abc import Sequence
from typing import Any

from charts.grid import grid, steps
from charts.rows import Row, good, in_order, panels, points, shown
from charts.theme import alt, side_by_side

CALL = ("model", "codec", "context", "batch", "budget", "confidence", "answer", "block")
COLUMNS = (
    *("policy", "clusters", "top_m", "update_threshold", *CALL, "accuracy", "correct", "examples"),
    *("tokens_per_second", "device_bytes", "host_bytes"),
)
NAMES = {"accuracy": "Right answers", "tokens_per_second": "Tokens/s", "device_bytes": "MiB on the device"}


def table(rows: Sequence[Row]) -> list[Row]:
    """All points, if any of them has C, M and T."""
    found = points(rows)
    return found if any("update_threshold" in row for row in found) else []


def chart(rows: Sequence[Row], width: int, figure: str) -> alt.TopLevelMixin:
    """A map of C and T for every M; `figure` is "accuracy", "tokens_per_second" or "device_bytes"."""
    cells = [row | {"C": str(row.get("clusters", "auto"))} for row in rows if "update_threshold" in row]
    bare: dict[str, Any] = {"domain": False, "ticks": False, "labelAngle": 0}
    clusters = sorted({row.get("clusters", "auto") for row in cells}, key=in_order)
    x = alt.X("update_threshold:O", title="T, commits", axis=alt.Axis(**bare))
    y = alt.Y("C:O", title="C, clusters", sort=[str(each) for each in clusters], axis=alt.Axis(**bare))
    begins = steps([row[figure] for row in good(cells)] or [0.0])

    def told(row: Row) -> str:
        return row["status"] if figure not in row else text(figure, row[figure])

    def draw(own: Sequence[Row], inner: int) -> Any:
        height = 30 * len({row["C"] for row in own})
        return grid(own, x, y, figure, begins, told, 0).properties(width=inner, height=height)

    return side_by_side(panels(cells, ("policy", "top_m", *CALL)), width, draw, margin=66, least=280)


def text(figure: str, value: float) -> str:
    """The text of a cell, without the unit that all cells share."""
    return f"{value / 2**20:.4g}" if figure == "device_bytes" else shown(figure, value)


def says(rows: Sequence[Row], figure: str) -> str:
    """The least and the largest figure, and the figures of policies without these options."""
    knobs = sorted((row for row in good(rows) if "update_threshold" in row), key=lambda row: row[figure])
    if not knobs:
        return f"{NAMES[figure]}: every point was refused, or failed"
    ends = [
        f"{text(figure, row[figure])} (C {row.get('clusters', 'auto')}, M {row['top_m']}, T {row['update_threshold']})"
        for row in (knobs[0], knobs[-1])
    ]
    others = [f"`{row['policy']}` {text(figure, row[figure])}" for row in good(rows) if "update_threshold" not in row]
    return "; ".join([f"{NAMES[figure]}: from {ends[0]} to {ends[1]}", *others])
