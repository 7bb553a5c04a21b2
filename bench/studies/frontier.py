"""The cost of right answers as freshness is turned up, policy by policy, on tasks that need a fresh prompt.

A cell is a task, the size of its prompts and a commit rule; its policies take turns. `SETTINGS` has equally many
settings of each policy: first that of its authors, then more and more updates. --setting takes some, by number. `none`
has nothing to set, and `polestar-paper` is as in the paper. `dkv_greedy` commits in random order, which is another
call. In a cell a setting is *near* if it has at most a point fewer right answers than `none`, on the same prompts.

Settings are chosen on the validation split; --split test measures the chosen ones once. Nothing stops early.

The last line of stdout has, over the cells with near settings of `polestar` and of others but `none`, the medians

    polestar_over_next_rows, polestar_over_next_time    least rows (seconds) of a near setting over those of the others
    polestar_below_none_points                          points of right answers from `none` to the one with least rows

and "cells", "cells_with_polestar_near": how many there were; and the same of `attended`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

from measuring.pages import markdown_table
from measuring.statistics import drop, merged
from measuring.study import Axes
from measuring.table import Row
from training.tasks import FRESH_TASKS
from workloads.answer_tables import asked_both, right_of, task
from workloads.answers import OF, TIMED, measure, tasks_of
from workloads.models import local, weights
from workloads.variants import RULES, Variant

from tiered.core.byte_size import format_bytes
from tiered.core.checks import unknown_name
from tiered.policies.registry import PRESETS, make_policy

__all__ = ["AXES", "OF", "QUICK", "TIMED", "last_line", "local", "measure", "points", "tables"]

NEAR = 0.01  # right answers fewer than those of `none`, as a share
# Tokens of an answer and of its blocks. Fresh answers, of up to 52 tokens, have four blocks too: in blocks of 32 the
# model commits signs and ends that it will only know when it is nearer.
LONG, FRESH = {"answer": 128, "block": 32}, {"answer": 64, "block": 16}
POLESTAR, NONE = "polestar", "none"
OURS = (POLESTAR, "attended")


def _turned(knob: str, values: Sequence[Any], **fixed: Any) -> list[dict[str, Any]]:
    return [fixed | {knob: value} for value in values]


REFRESHES = (None, 16, 8, 4, 3, 2)  # steps from one full pass to the next
FRESH_RULE = PRESETS["polestar-fresh"][1]
SETTINGS: Mapping[str, list[dict[str, Any]]] = {
    NONE: [{}],
    "fast_dllm_prefix": _turned("refresh_interval", REFRESHES),
    "fast_dllm_dual": _turned("refresh_interval", REFRESHES),
    "uniform": _turned("refresh_interval", REFRESHES),
    "dkv_decode": _turned("refresh_interval", (8, 32, 16, 4, 3, 2)),
    "dkv_prefill": _turned("prompt_interval", REFRESHES),
    "dkv_pd": _turned("prompt_interval", REFRESHES),
    "dllm_cache": _turned("prompt_interval", (50, 16, 8, 4, 3, 2)),
    "elastic_cache": _turned("similarity_threshold", (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)),
    "attended": [{}, *_turned("attended_rows", (8, 16, 64, 128)), {"refresh_blocks": 1}],
    POLESTAR: [
        {"update_threshold": 4},
        {"update_threshold": 0},
        *(FRESH_RULE | given for given in ({"top_m": 8}, {}, {"top_m": 64}, {"refresh": "drift"})),
    ],
    "polestar-paper": [{}],
}
AXES: Axes = {
    "model": ["embedded-fresh"],
    "policy": [*SETTINGS],
    "setting": [1, 2, 3, 4, 5, 6],
    "rule": [*RULES["mask"]],
    "examples": [*(f"{name}@{tokens}:400" for name in FRESH_TASKS for tokens in (1024, 2048)), "long_chain:400"],
    "split": ["validation"],
}
QUICK: Axes = {"policy": [NONE, "fast_dllm_dual", POLESTAR], "rule": ["threshold 0.9"], "examples": ["sort:2"]}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """All settings of all policies in turn within a cell."""
    for name, known in (("policy", SETTINGS), ("rule", RULES["mask"])):
        if wrong := next((each for each in axes[name] if each not in known), None):
            raise unknown_name(name, wrong, known)
    cells = product(axes["model"], axes["split"], tasks_of(axes["examples"]), axes["rule"])
    for (model, split, asked, rule), policy in product(cells, axes["policy"]):
        sizes = FRESH if asked[0] in FRESH_TASKS else LONG
        for options in (of for number, of in enumerate(SETTINGS[policy], 1) if number in axes["setting"]):
            one_block = make_policy(policy, **options).name == "elastic_cache"
            call = Variant(name=policy, policy=policy, one_block=one_block).call(**sizes)
            of = {"policy": policy, "options": options, "call": call | RULES["mask"][rule]}
            yield weights(model) | of | {"rule": rule, "split": split, "tasks": [asked]}


def cells(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of each cell that has one of `none`, each with "rows" (recomputed for an answer), "below" and "near".
    "below" is the share of right answers from `none` to the row, with its bounds. A setting of several rows has the
    longest one, but the fastest time of an answer, because long runs go on beside other work. Two settings are compared
    on the prompts of both, which are the first ones."""
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], Row]] = {}
    for row in merged(rows, of=OF, timed=TIMED):
        if row["status"] == "ok":
            own = found.setdefault((row["model"], row["split"], task(row), row["rule"]), {})
            setting = row["policy"], *row["options"].items()
            kept = own.setdefault(setting, row)
            longest, fastest = max(row, kept, key=_examples), min(row, kept, key=_seconds)
            own[setting] = longest | {"seconds": _seconds(fastest) * longest["examples"]}
    for own in found.values():
        if (none := own.get((NONE,))) is None:
            continue
        for row in own.values():
            exact, right = asked_both(none, row)
            row["rows"] = row["rows_per_forward"] * row["nfe"]
            row["below"] = drop(exact, right)
            row["near"] = sum(exact) - sum(right) <= NEAR * len(right)
    return {cell: [*own.values()] for cell, own in found.items() if (NONE,) in own}


def _examples(row: Row) -> int:
    return row["examples"]


def _seconds(row: Row) -> float:
    """Seconds of an answer."""
    return row["seconds"] / row["examples"]


def best(rows: Sequence[Row], figure: str = "rows") -> Row:
    """The near row with the least `figure`; without a near row, the one with most right answers."""
    return min(rows, key=lambda row: (not row["near"], row[figure] if row["near"] else -row["correct"]))


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`frontier`: by cell and policy the near setting with least rows, else the setting with most right answers."""
    lines = []
    for (_, split, asked, rule), own in cells(rows).items():
        of = f"{asked}, {rule}" if split == "validation" else f"{asked}, {rule}, {split}"
        for policy in dict.fromkeys(row["policy"] for row in own):
            row = best([row for row in own if row["policy"] == policy])
            share, low, high = (100 * value for value in row["below"])
            lines.append(
                [
                    f"{of}: `{policy}`",
                    ", ".join(f"{name} {value}" for name, value in row["options"].items()),
                    right_of([row]),
                    f"{share:.1f} ({low:.1f} to {high:.1f})",
                    "near" if row["near"] else "",
                    f"{row['rows']:.0f}",
                    f"{_seconds(row):.2f}",
                    format_bytes(row["device_bytes"]),
                    format_bytes(row["host_bytes"]) if row["host_bytes"] else "0",
                ]
            )
    columns = ["", "setting", "right", "points below `none`", "", "rows", "s", "device", "host"]
    return {"frontier": markdown_table(columns, lines)}


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of the last line."""
    found = cells(rows)
    return {"cells": len(found)} | {name: value for ours in OURS for name, value in _over_next(found, ours).items()}


def _over_next(found: Mapping[Any, Sequence[Row]], policy: str) -> dict[str, Any]:
    """The figures of `policy` over those of all others except `none`, in cells in which both are near."""
    ratios, below, with_ours = {"rows": list[float](), "seconds": list[float]()}, list[float](), 0
    for own in found.values():
        near = [row for row in own if row["near"] and row["policy"] != NONE]
        ours, others = ([row for row in near if (row["policy"] == policy) is mine] for mine in (True, False))
        with_ours += bool(ours)
        if ours and others:
            for figure, values in ratios.items():
                values.append(best(ours, figure)[figure] / best(others, figure)[figure])
            below.append(100 * best(ours)["below"][0])
    return {
        f"{policy}_over_next_rows": _median(ratios["rows"]),
        f"{policy}_over_next_time": _median(ratios["seconds"]),
        f"{policy}_below_none_points": _median(below),
        f"cells_with_{policy}_near": with_ours,
    }


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 3) if values else None
