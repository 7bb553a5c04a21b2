"""The time of a forward, by operation and policy; the sum of operations matches the wall clock.

Each call is made once to warm up, once without a recorder and once under it. The share of an operation is without those
inside it; `covered` is the sum of all over the wall clock, which another clock has measured. Beside them stand bytes
and FLOPs of a plain step over one block and of a refresh. Their floor is by the rates that this machine reaches in a
matrix product and in reading memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from measuring.pages import markdown_table
from measuring.statistics import merged
from measuring.study import Axes
from workloads.operations import OF, TIMED, measure
from workloads.subjects import SIZES, local, points_of

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

CALL: Axes = {"dtype": ["float32"], "answer": [32], "block": [32], "steps": [16], "positions": [1024], "batch": [1]}
POLICIES = ["none", "fast_dllm_dual", "polestar", "dllm_cache", "dkv_decode", "elastic_cache"]
AXES: Axes = {**SIZES, "model": ["random", "embedded"], **CALL, "policy": POLICIES}
QUICK: Axes = {"model": ["random"], "width": [128], "layers": [3], "positions": [256]}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn over calls of one size."""
    return points_of(axes, *CALL, "policy")


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A column for each policy: ms a forward, its floors, and the shares of the operations."""
    cells = dict[str, dict[str, str]]()
    for row in merged(rows, of=OF, timed=TIMED):
        name, policy = f"{row['model']}, {row['batch']} x {row['positions']}", row["policy"]
        if row["status"] != "ok":
            cells.setdefault(f"{name}: ms a forward", {})[policy] = row["why"]
            continue
        of_call = {
            "ms a forward": f"{row['wall_ms'] / row['forwards']:.1f}",
            "floor of a step, of a refresh": f"{row['step_floor_ms']:.1f}, {row['refresh_floor_ms']:.1f}",
            "covered": f"{row['covered']:.3f}",
        }
        for what, cell in (of_call | {row["op"]: f"{100 * row['share']:.1f} %"}).items():
            cells.setdefault(f"{name}: {what}", {})[policy] = cell
    policies = list(dict.fromkeys(policy for of_line in cells.values() for policy in of_line))
    lines = [[line, *map(of_line.get, policies)] for line, of_line in cells.items()]
    return {"ops": markdown_table(["", *(f"`{policy}`" for policy in policies)], lines)}
