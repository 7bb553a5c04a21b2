"""A bar is the time of fetches to the device for a layer, over all updates of a call. Hidden time passes while compute
goes on, exposed time while it waits. Less exposed time is better."""

from collections.abc import Sequence
from typing import Any

from charts.rows import Row, good, panels, shown
from charts.theme import LIGHT, alt, colour, data, side_by_side

CALL = ("link", "call")
COLUMNS = ("study", *CALL, "layer", "copy_ms", "exposed_ms", "exposed_share", "bytes")


def table(rows: Sequence[Row]) -> list[Row]:
    """Rows of single layers."""
    found = []
    for row in good(rows):
        if row.get("about", "copies") == "copies" and row["layer"] >= 0:
            busy = row.get("copy_ms", row.get("busy_ms"))
            found.append(row | {"copy_ms": busy, "exposed_share": row["exposed_ms"] / busy if busy else 0.0})
    return found


def chart(rows: Sequence[Row], width: int) -> alt.TopLevelMixin:
    """A panel for each link, or call, with a bar for every layer."""

    def draw(own: Sequence[Row], inner: int) -> Any:
        # An asynchronous clock may see a wait end a little after its copy.
        bars = [
            {"layer": row["layer"], "part": "hidden", "ms": max(0.0, row["copy_ms"] - row["exposed_ms"])} for row in own
        ]
        bars += [{"layer": row["layer"], "part": "exposed", "ms": row["exposed_ms"]} for row in own]
        layers = alt.Y("layer:O", axis=alt.Axis(ticks=False, domain=False, labelOverlap=True))
        time, parts = alt.X("ms:Q", title="copy time, ms", axis=alt.Axis(tickCount=4)), ("hidden", "exposed")
        paint = colour("part", {part: LIGHT[part] for part in parts}, width)
        chart = data(bars).mark_bar().encode(time, layers, paint, order=alt.Order("part:N", sort="descending"))
        return chart.properties(width=inner, height=min(320, 20 * len(own) + 10))

    return side_by_side(panels(rows, CALL), width, draw, margin=52, least=290)


def says(rows: Sequence[Row]) -> str:
    """The least and the largest share of the copy time that compute waits for."""
    shares = {}
    for title, own in panels(rows, CALL).items():
        shares[title] = sum(row["exposed_ms"] for row in own) / (sum(row["copy_ms"] for row in own) or 1.0)
    ends = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    told = [f"{shown('share', shares[title])} of the copy time" + (f" ({title})" if title else "") for title in ends]
    return f"Compute waits for {told[0]} at best, and for {told[1]} at worst"
