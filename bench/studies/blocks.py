"""Families whose rows see blocks: recorded histories again, and the exact cache beside the rows it feeds.

Part `recorded`: every recorded case of a family, logits and histories with the rows of each forward. Part `cost`: a
random model of SDAR-8B's proportions in float32 answers behind a prompt; the floor is the share of a full pass, with
torch's own attention, that the rows of all its forwards are. About a minute on one idle core.

The last line of stdout says, beside the counts,

    families_identical              whether all recorded cases came out, of every family
    exact_cache_over_row_floor      seconds of the call over the floor, the median of all rounds

each null as long as its rows are missing.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from workloads import blocks

__all__ = ["AXES", "OF", "QUICK", "TIMED", "last_line", "measure", "points", "tables"]

OF = ("case",)
TIMED = ("seconds", "full_seconds", "floor_seconds", "over_floor")
AXES: Axes = {
    "part": ["recorded", "cost"],
    "family": [*blocks.FAMILIES],
    "context": [2048],
    "block": [32],
    "steps": [8],
    "blocks": [4],
    "width": [512],
    "layers": [8],
}
QUICK: Axes = {"context": [96], "block": [8], "blocks": [2], "steps": [2], "width": [64], "layers": [4]}
COST = {
    "seconds": "{seconds:.2f}",
    "floor": "{floor_seconds:.2f}",
    "over the floor": "{over_floor:.2f}",
    "rows": "{rows_fed:.0f}",
    "full pass": "{full_seconds:.2f}",
}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """The families, then the costs."""
    if "recorded" in axes["part"]:
        yield from ({"part": "recorded", "family": family} for family in axes["family"])
    if "cost" in axes["part"]:
        names = ("context", "block", "steps", "blocks", "width", "layers")
        for values in product(*(axes[name] for name in names)):
            yield {"part": "cost", **dict(zip(names, values, strict=True))}


def measure(settings: Mapping[str, Any]) -> Iterator[Row]:
    """As `workloads.blocks`."""
    return blocks.recorded(settings["family"]) if settings["part"] == "recorded" else blocks.cost(settings)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`blocks`: what calls cost."""
    seen = [row for row in merged(rows, of=OF, timed=TIMED) if row["part"] == "cost"]
    return {"blocks": rows_table("{context} tokens, {blocks} blocks of {block} in {steps} steps", COST, seen)}


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    """What the last line says of the figures that have goals."""
    told = [row for row in rows if row["part"] == "recorded"]
    costs = [row["over_floor"] for row in rows if row["part"] == "cost" and row["status"] == "ok"]
    return {
        "families_identical": all(row["status"] == "ok" and row["identical"] for row in told) if told else None,
        "exact_cache_over_row_floor": median(costs) if costs else None,
    }
