"""How far cached keys and values of the prompt are from an uncached pass, by codec and by clustering.

The mean cosine distance over steps and layers; beside it what calls moved between tiers, and how many clusters updates
renewed.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from workloads.answer_tables import Column, pivot, policy, size, where
from workloads.answers import OF, answerer, tasks_of
from workloads.models import paths, weights

from tiered.core.checks import unknown_name
from tiered.embedded import tasks
from tiered.observe.analysis.reports import Area
from tiered.observe.analysis.token_drift import measure_token_drift

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

TIMED = ()
# Options by the name that they go by; the policy is what stands in front of the comma.
SETS: dict[str, dict[str, Any]] = {
    "fast_dllm_dual": {},
    "polestar, raw": {"codec": "raw"},
    "polestar, fp8": {"codec": "fp8"},
    "polestar": {},
    "polestar, raw, clusters by layer": {"codec": "raw", "cluster_layers": 1},
    "polestar, clusters by layer": {"cluster_layers": 1},
    "polestar-paper, raw": {"codec": "raw"},
}
AXES: Axes = {"model": ["embedded"], "policy": [*SETS], "examples": ["lookup@992:2", "sort:2"]}
QUICK: Axes = {"policy": ["fast_dllm_dual", "polestar"], "examples": ["sort:1"]}
CALL = {"max_new_tokens": 32, "block_length": 32, "steps": 16, "stop_at_eos": False}


def local(axes: Axes) -> dict[str, Any]:
    """Where the models are."""
    return {"paths": paths(axes["model"])}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn for each question."""
    for model, examples, name in product(axes["model"], axes["examples"], axes["policy"]):
        if name not in SETS:
            raise unknown_name("policy", name, SETS)
        yield weights(model) | {"policy": name, "options": SETS[name], "call": CALL, "tasks": tasks_of([examples])}


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[Row]:
    """A row for each task."""
    runtime, prompt = answerer(settings, paths), list(Area).index(Area.PROMPT)
    for name, tokens, count in settings["tasks"]:
        found, moved, repairs = [], 0, 0
        for seed in range(settings["seed"], settings["seed"] + count):
            chat = [[{"role": "user", "content": tasks.sample(name, "test", seed, size=tokens).prompt}]]
            report = measure_token_drift(runtime, chat, **settings["call"])
            found.append([np.nanmean(report.keys[..., prompt]), np.nanmean(report.values[..., prompt])])
            out = runtime.generate(chat, **settings["call"])
            moved += sum(out.memory.moved.values())
            repairs += sum(update.repairs for update in out.updates)
        keys, values = np.mean(found, axis=0).tolist()
        of = {"task": name, "size": tokens, "examples": count}
        yield of | {"keys": keys, "values": values, "moved_bytes": moved, "repairs": repairs}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """A line for each policy."""
    seen = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]
    columns: dict[str, Column] = {}
    for name in dict.fromkeys(row["task"] for row in seen):
        columns[f"{name}: values, 10⁻³"] = (where(task=name), lambda own: f"{1e3 * own[0]['values']:.2f}")
        columns[f"{name}: moved"] = (where(task=name), size("moved_bytes"))
        columns[f"{name}: repairs"] = (where(task=name), lambda own: str(own[0]["repairs"]))
    return {"drift": pivot(seen, policy, columns)}
