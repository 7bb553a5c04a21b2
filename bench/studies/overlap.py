"""The share of an update's copies that compute hides, with a GPU's link slowed down to this CPU's speed.

Nothing here is a measurement of a GPU: the ratio of a copy to a block's attention follows from data sheets.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from measuring.pages import markdown_table
from measuring.statistics import merged
from measuring.study import Axes
from workloads.overlap import GPUS, OF, TIMED, measure
from workloads.subjects import SIZES, local, points_of

from tiered.core.checks import unknown_name

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

CALL: Axes = {"positions": [4096], "answer": [32], "steps": [16]}
AXES: Axes = {**SIZES, **CALL, "link": list(GPUS)}
QUICK: Axes = {"width": [256], "layers": [5], "positions": [1024]}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Every link."""
    for link in axes["link"]:
        if link not in GPUS:
            raise unknown_name("link", link, GPUS)
    return points_of(axes, *CALL, "link")


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The share of the copies' time during which compute went on: in all layers, and the least and most of a layer."""
    good = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]
    shares, lines = dict[str, list[float]](), list[list[str]]()
    for row in good:
        shares.setdefault(row["link"], []).append(100 * row["hidden_share"])
    ratios = {row["link"]: f"{row['copy_over_attention']:.2f}" for row in good if row["layer"] == -1}
    for link, (whole, *layers) in shares.items():
        lines.append([link, ratios[link], f"{whole:.1f} % ({min(layers):.0f}-{max(layers):.0f} % by layer)"])
    return {"overlap": markdown_table(["link beside memory", "copy over attention", "hidden"], lines)}
