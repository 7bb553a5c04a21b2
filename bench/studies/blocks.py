"""Families whose rows see blocks: recorded histories again, and the exact cache beside a full pass.

Part `recorded`: every recorded case of a family, logits and histories with the rows of each forward. Part `cost`: a
random model of SDAR-8B's proportions in float32 answers behind a prompt. Its floor is a full pass with torch's own
attention, times the rows of all forwards over the positions. Part `answers`: right answers of the embedded model that
sees blocks, on the test split, by task. It takes about ten minutes on one idle core.

The last line of stdout says, beside the counts,

    families_identical              true if all recorded cases of every family are the same
    exact_cache_over_row_floor      seconds of the call over the floor, the median of all rounds
    exact_match                     right answers by task, one token a step, in per cent

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
from training.tasks import LONG_TASKS, TASKS
from workloads import answers, blocks
from workloads.answer_tables import by_task
from workloads.models import local, weights
from workloads.variants import RULES

__all__ = ["AXES", "OF", "QUICK", "TIMED", "last_line", "local", "measure", "points", "tables"]

OF = ("case", *answers.OF)
TIMED = ("full_seconds", "floor_seconds", "over_floor", *answers.TIMED)
SLOW, FAST = RULES["mask"]
LOOKUPS = {512: 60, 1024: 30, 2048: 12, 4096: 12, 6144: 6}  # prompt tokens, and how many are asked
AXES: Axes = {
    "part": ["recorded", "cost", "answers"],
    "family": [*blocks.FAMILIES],
    "context": [2048],
    "block": [32],
    "steps": [8],
    "blocks": [4],
    "width": [512],
    "layers": [8],
    "model": ["embedded-blocks"],
    "policy": ["block_causal"],
    "rule": [SLOW, FAST],
    "short": [*(f"{task}:100" for task in TASKS), *(f"lookup@{size}:{count}" for size, count in LOOKUPS.items())],
    "long": [f"{task}:40" for task in LONG_TASKS],
}
QUICK: Axes = {
    "context": [96], "block": [8], "blocks": [2], "steps": [2], "width": [64], "layers": [4],
    "model": ["embedded-blocks"], "rule": [FAST], "short": ["copy:1"], "long": ["long_copy:1"],
}  # fmt: skip
ANSWER, LONG_ANSWER = 32, 128
COST = {
    "seconds": "{seconds:.2f}",
    "floor": "{floor_seconds:.2f}",
    "over the floor": "{over_floor:.2f}",
    "rows": "{rows_fed:.0f}",
    "full pass": "{full_seconds:.2f}",
}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """The families, then the costs, then answers, short ones in front of long ones."""
    if "recorded" in axes["part"]:
        yield from ({"part": "recorded", "family": family} for family in axes["family"])
    if "cost" in axes["part"]:
        names = ("context", "block", "steps", "blocks", "width", "layers")
        for values in product(*(axes[name] for name in names)):
            yield {"part": "cost", **dict(zip(names, values, strict=True))}
    if "answers" in axes["part"]:
        for model, policy, rule in product(axes["model"], axes["policy"], axes["rule"]):
            of = {"part": "answers"} | weights(model) | {"policy": policy, "options": {}, "rule": rule}
            for length, asked in ((ANSWER, axes["short"]), (LONG_ANSWER, axes["long"])):
                call = {"max_new_tokens": length} | RULES["mask"][rule]
                yield of | {"call": call, "tasks": answers.tasks_of(asked)}


def measure(settings: Mapping[str, Any], **local: Any) -> Iterator[Row]:
    """As `workloads.blocks` and `workloads.answers`."""
    if settings["part"] == "answers":
        return answers.measure(settings, **local)
    return blocks.recorded(settings["family"]) if settings["part"] == "recorded" else blocks.cost(settings)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`blocks`: costs of calls; `blocks_answers`: their right answers."""
    seen = merged(rows, of=OF, timed=TIMED)
    cost, answered = ([row for row in seen if row["part"] == part] for part in ("cost", "answers"))
    return {
        "blocks": rows_table("{context} tokens, {blocks} blocks of {block} in {steps} steps", COST, cost),
        "blocks_answers": by_task(answered),
    }


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that have goals, for the last line."""
    told = [row for row in rows if row["part"] == "recorded"]
    costs = [row["over_floor"] for row in rows if row["part"] == "cost" and row["status"] == "ok"]
    right = {
        row["task"] + (f"@{row['size']}" if row.get("size") else ""): round(100 * row["correct"] / row["examples"], 1)
        for row in merged(rows, of=OF, timed=TIMED)
        if row["part"] == "answers" and row["status"] == "ok" and row["rule"] == SLOW
    }
    return {
        "families_identical": all(row["status"] == "ok" and row["identical"] for row in told) if told else None,
        "exact_cache_over_row_floor": median(costs) if costs else None,
        "exact_match": right or None,
    }
