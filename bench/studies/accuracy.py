"""Exactly right answers of an embedded model: by task, policy and commit rule, with intervals.

Every example is of the test split, whose prompts are never trained on; `--seed` is the number of the first one. The
tasks of `--examples` are asked under every rule. Lookups of `--lookups` tokens are asked with one token a step. Tasks
of `--long`, whose answers fill two to four blocks, are asked with all sure tokens at once. Tasks of `--fresh`, such as
sort_marked@1024:30, which `embedded-fresh` has learned, are asked both ways.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from training.tasks import LONG_TASKS, TASKS
from workloads.answer_tables import by_task
from workloads.answers import OF, TIMED, measure, tasks_of
from workloads.models import local, weights
from workloads.variants import RULES, noise_of

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

FAST, EARLY = "threshold 0.9", "drift_aware 0.9"
OF_MASKS = RULES["mask"] | {EARLY: {"commit": "drift_aware", "confidence_threshold": 0.9}}
CALLS = RULES | {"mask": OF_MASKS}
AXES: Axes = {
    "model": ["embedded"],
    "policy": ["none", "fast_dllm_dual", "polestar"],
    "rule": [*dict.fromkeys(rule for rules in CALLS.values() for rule in rules)],
    "block": [32],
    "examples": [f"{task}:200" for task in TASKS],
    "lookups": [512, 1024, 2048, 3968],
    "long": [f"{task}:60" for task in LONG_TASKS],
    "fresh": [None],
}
QUICK: Axes = {
    "examples": ["sort:2", "add:2"],
    "lookups": [None],
    "long": ["long_copy:1"],
    "rule": [FAST],
}
FEWER = {1024: 30, 2048: 12, 3968: 6}  # lookups by their tokens; 60 of others
LONG_ANSWER = 128


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn under each rule, for each length of prompts and answers."""
    for model in axes["model"]:
        noise, own = noise_of(model), weights(model)
        rules, slow = [rule for rule in CALLS[noise] if rule in axes["rule"]], next(iter(CALLS[noise]))
        for rule, block, policy in product(rules, axes["block"], axes["policy"]):
            call = {"max_new_tokens": 32, "block_length": block} | CALLS[noise][rule]
            sizes = [size for size in axes["lookups"] if size is not None and rule == slow]
            for examples in (axes["examples"], *([f"lookup@{size}:{FEWER.get(size, 60)}"] for size in sizes)):
                of = {"policy": policy, "options": {}, "call": call, "tasks": tasks_of(examples)}
                yield own | {"noise": noise, "rule": rule, "block": block} | of
            if noise == "uniform":
                continue  # models of this noise know answers of one block alone
            fresh = [[text] for text in axes["fresh"] if text is not None]
            for examples in (*([axes["long"]] if rule != slow else []), *fresh):
                long = {"call": call | {"max_new_tokens": LONG_ANSWER}, "tasks": tasks_of(examples)}
                yield own | {"noise": noise, "rule": rule, "block": block, "policy": policy, "options": {}} | long


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Tables by task for each noise; `early`: early commits beside the same threshold without them."""
    seen = merged(rows, of=OF, timed=TIMED)
    shown = {
        "accuracy": [row for row in seen if row["noise"] == "mask" and row["rule"] != EARLY],
        "accuracy-uniform": [row for row in seen if row["noise"] == "uniform"],
        "early": [row for row in seen if row["rule"] in (FAST, EARLY)],
    }
    return {mark: by_task(own) for mark, own in shown.items() if own}
