"""What of its copies an update hides, with a GPU's link slowed down to this machine's attention.

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
AXES: Axes = {**SIZES, **CALL, "link": list(GPUS), "prefetch_layers": [0, 1]}
QUICK: Axes = {"width": [256], "layers": [5], "positions": [1024]}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Every link, with nothing fetched ahead and with layers ahead in turn."""
    for link in axes["link"]:
        if link not in GPUS:
            raise unknown_name("link", link, GPUS)
    return points_of(axes, *CALL, "link", "prefetch_layers")


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The share of the copies' time during which compute went on: in all layers, and the least and most of a layer."""
    good = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]
    aheads, shares, lines = sorted({row["prefetch_layers"] for row in good}), dict[Any, list[float]](), {}
    for row in good:
        shares.setdefault((row["link"], row["prefetch_layers"]), []).append(100 * row["hidden_share"])
        if row["layer"] == -1:
            lines.setdefault(row["link"], [row["link"], f"{row['copy_over_attention']:.2f}"])
    for link, line in lines.items():
        for ahead in aheads:
            whole, *layers = shares.get((link, ahead), [0.0])
            line.append(f"{whole:.1f} % ({min(layers):.0f}-{max(layers):.0f} % by layer)" if layers else None)
    heads = ["nothing ahead", "one layer ahead", *(f"{ahead} layers ahead" for ahead in aheads if ahead > 1)]
    return {"overlap": markdown_table(["link beside memory", "copy over attention", *heads], lines.values())}
