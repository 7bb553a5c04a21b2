"""The costs of each policy: a plain step, a refresh, an update, and a whole run.

A random model in float32, one token a step. A plain step neither refreshes nor updates anything. Time is over that of a
full pass; over the floor it is also over the share of the positions that is recomputed. The overhead is the time of a
layer of a plain step, with its share of choosing rows, over a layer of a block-only step. That is the dual cache's step
over one block with the rows of the policy's plain step. A whole run is over the dual cache's, and over that of `none`,
which is as many full passes. Beside it stands the same of rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from workloads.policy_cost import TIMED, measure
from workloads.subjects import SIZES, local, points_of
from workloads.variants import all_variants

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

CALL: Axes = {"positions": [2048], "answer": [64], "block": [32]}
# References of other calls are full passes like `none`.
AXES: Axes = {**SIZES, **CALL, "policy": [variant.name for variant in all_variants() if variant.policy != "none"]}
QUICK: Axes = {"width": [128], "layers": [2], "positions": [512]}
OF: Sequence[str] = ()
COLUMNS = {
    "a step: rows": "{step_rows:.0f}",
    "over full": "{step_over_full:.4f}",
    "over floor": "{step_over_floor:.2f}",
    "overhead": "{overhead:.2f}",
    "a refresh: rows, over full": "{refresh_rows:.0f}, {refresh_over_full:.3f}",
    "an update: rows, over full": "{update_rows:.0f}, {update_over_full:.3f}",
    "refreshes": "{refresh_forwards}",
    "updates": "{update_forwards}",
    "forwards": "{forwards}",
    "a run over the dual cache's: time, rows": "{run_over_dual:.2f}, {rows_over_dual:.2f}",
    "over that of `none`": "{run_over_none:.3f}, {rows_over_none:.3f}",
}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Every policy in turn."""
    return points_of(axes, *CALL, "policy")


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A line for each policy; a cell is empty if the policy has no such forward."""
    return {"policy_cost": rows_table("`{policy}`", COLUMNS, merged(rows, of=OF, timed=TIMED))}
