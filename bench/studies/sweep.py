"""Effects of clusters C, renewed clusters M and update threshold T, by codec, context, batch and budget.

The full grid over the axes, on tasks of the embedded model. A policy ignores axes that it does not have, so `none` is
one point whatever C, M and T. A preset keeps its own options. `--examples` is a list of TASK:COUNT. `--option` is a
list of NAME=VALUE, or several of them with blanks between: other options, for the policies that have them.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from measuring.statistics import interval, merged
from measuring.study import Axes
from measuring.table import Row
from workloads.answer_tables import Column, pivot, policy, size, where
from workloads.answers import OF, TIMED, measure, tasks_of
from workloads.models import local, weights

from tiered.cli.flags import policy_options
from tiered.core.byte_size import parse_bytes
from tiered.core.checks import unknown_name
from tiered.policies.registry import PRESETS, make_policy

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

OPTIONS = ("clusters", "top_m", "update_threshold", "codec")
AXES: Axes = {
    "clusters": ["auto", 4, 8, 16, 32],
    "top_m": [1, 2, 4],
    "update_threshold": [0, 1, 2, 4, 8],
    "codec": ["nvfp4_delta"],
    "option": [None],
    "policy": ["polestar", "none", "fast_dllm_dual"],
    "context": [512],
    "batch": [8],
    "budget": [None],
    "confidence": [0.99],
    "examples": ["sort:60", "chain:40", "lookup:4"],
    "answer": [32],
    "block": [32],
    "model": ["embedded"],
}
QUICK: Axes = {"clusters": [4], "top_m": [1], "update_threshold": [0, 2], "examples": ["sort:2"], "context": [64]}
SHOWN = "sort"  # the task that depends on fresh prompts; the others hardly differ


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn within the same call."""
    calls = ("model", "answer", "block", "context", "batch", "budget", "confidence")
    for model, answer, block, context, batch, budget, confidence in product(*(axes[axis] for axis in calls)):
        call = {"max_new_tokens": answer, "block_length": block}
        call |= {} if confidence is None else {"confidence_threshold": confidence}
        call_of = {"call": call, "tasks": tasks_of(axes["examples"], context), "context": context, "batch": batch}
        call_of |= {"budget": None if budget is None else parse_bytes(budget), "confidence": confidence}
        for name in axes["policy"]:
            for options in option_sets(name, axes):
                yield weights(model) | {"policy": name, "options": options} | call_of | options


def option_sets(policy: str, axes: Axes) -> Iterator[dict[str, Any]]:
    """The options of every point of `policy`. A preset keeps its own options."""
    known = {name: [*make_policy(name).options] for name in axes["policy"]}
    own = [axis for axis in OPTIONS if axis in known[policy] and policy not in PRESETS]
    for extra, *values in product(axes["option"], *(axes[axis] for axis in own)):
        given = policy_options(Namespace(policy_option=(extra or "").split()))
        for name in given:
            if not any(name in options for options in known.values()):
                raise unknown_name(
                    f"option of {', '.join(known)}", name, {each for names in known.values() for each in names}
                )
        options = {name: value for name, value in given.items() if name in known[policy]}
        options |= dict(zip(own, values, strict=True))
        make_policy(policy, **options)
        yield options


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Right answers and tokens/s of `SHOWN` by T, a line for every C and M; then the policies without such options."""
    good = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok" and row["task"] == SHOWN]
    thresholds = sorted({row["update_threshold"] for row in good if "update_threshold" in row}) or [None]

    def place(row: Row) -> tuple[int, int, str]:
        """A key for sorting: most renewed clusters first, then "auto", then fewest clusters."""
        clusters = row.get("clusters", 0)
        return -row.get("top_m", 0), 0 if clusters == "auto" else clusters, row["policy"]

    def line(row: Row) -> str:
        return f"C {row['clusters']}, M {row['top_m']}" if "top_m" in row else policy(row)

    def column(threshold: int | None) -> Column:
        return (
            lambda row: row.get("update_threshold", thresholds[0]) == threshold,
            lambda own: f"{own[0]['correct']} ({own[0]['tokens_per_second']:.0f})",
        )

    columns = {f"T {threshold}": column(threshold) for threshold in thresholds}
    columns |= {name: (where(), size(f"{name}_bytes")) for name in ("device", "host")}
    parts = [pivot(sorted(good, key=place), line, columns)]
    if widths := [high - low for low, high in (interval(row["correct"], row["examples"]) for row in good)]:
        parts += [f"Each count stands for a share that is known to within {50 * max(widths):.0f} points (95 %)."]
    return {"sweep": "\n\n".join(parts)}
