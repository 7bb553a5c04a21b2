"""Distances of cached keys and values of the prompt from an uncached pass, by codec and by clustering.

They are cosine distances, the mean over steps and layers. Beside them stand bytes that calls moved between tiers, and
clusters that updates fetched for their other members (`repairs`). Part `floor`: the move of centroids' attention by
coding keys (--kv), beside the move by a step. Polestar's drift is the KL of such a move.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from training import tasks
from workloads import drift_floor
from workloads.answer_tables import Column, pivot, policy, size, task, where
from workloads.answers import OF, answerer, tasks_of
from workloads.canvas_areas import Area
from workloads.models import local, weights
from workloads.staleness import measure_staleness
from workloads.variants import KV

from tiered.core.checks import unknown_name

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

TIMED = ()
# Options by name; the policy is the part of the name in front of a comma.
SETS: dict[str, dict[str, Any]] = {
    "fast_dllm_dual": {},
    "polestar, raw": {"codec": "raw"},
    "polestar, fp8": {"codec": "fp8"},
    "polestar": {},
    "polestar, raw, clusters by layer": {"codec": "raw", "cluster_layers": 1},
    "polestar, clusters by layer": {"cluster_layers": 1},
    "polestar-paper, raw": {"codec": "raw"},
}
AXES: Axes = {
    "model": ["embedded"],
    "part": ["caches", "floor"],
    "policy": [*SETS],
    "kv": [*KV[1:]],
    "examples": ["lookup@992:2", "sort:2"],
}
QUICK: Axes = {"policy": ["fast_dllm_dual", "polestar"], "kv": ["fp8"], "examples": ["sort:1"]}
CALL = {"max_new_tokens": 32, "block_length": 32, "steps": 16, "stop_at_eos": False}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn for each question, and codecs."""
    for model, examples, part in product(axes["model"], axes["examples"], axes["part"]):
        of = weights(model) | {"call": CALL, "tasks": tasks_of([examples])}
        if part == "floor":
            yield from (of | {"kv": kv} for kv in axes["kv"])
            continue
        if part != "caches":
            raise unknown_name("part", part, AXES["part"])
        for name in axes["policy"]:
            if name not in SETS:
                raise unknown_name("policy", name, SETS)
            yield of | {"policy": name, "options": SETS[name]}


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[Row]:
    """A row for each task; of the floor, see `workloads.drift_floor`."""
    if "kv" in settings:
        yield from drift_floor.measure(settings, paths=paths)
        return
    runtime, prompt = answerer(settings, paths), list(Area).index(Area.PROMPT)
    for name, tokens, count in settings["tasks"]:
        found, moved, repairs = [], 0, 0
        for seed in range(settings["seed"], settings["seed"] + count):
            chat = [[{"role": "user", "content": tasks.sample(name, "test", seed, size=tokens).prompt}]]
            report = measure_staleness(runtime, chat, **settings["call"])
            found.append([np.nanmean(report.keys[..., prompt]), np.nanmean(report.values[..., prompt])])
            out = runtime.generate(chat, **settings["call"])
            moved += sum(out.memory.moved.values())
            repairs += sum(update.repairs for update in out.updates)
        keys, values = np.mean(found, axis=0).tolist()
        of = {"task": name, "size": tokens, "examples": count}
        yield of | {"keys": keys, "values": values, "moved_bytes": moved, "repairs": repairs}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`drift`: a line for each policy; `drift_floor`: for each codec and question."""
    seen = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]
    columns: dict[str, Column] = {}
    caches, floor = ([row for row in seen if name in row] for name in ("policy", "kv"))
    for name in dict.fromkeys(row["task"] for row in caches):
        columns[f"{name}: values, 10⁻³"] = (where(task=name), lambda own: f"{1e3 * own[0]['values']:.2f}")
        columns[f"{name}: moved"] = (where(task=name), size("moved_bytes"))
        columns[f"{name}: repairs"] = (where(task=name), lambda own: str(own[0]["repairs"]))
    far = {"coding": "{noise:.2e}", "a step": "{step:.2e}", "a step, coded": "{coded_step:.2e}"}
    lines = rows_table("{kv}: {of}", far | {"chosen alike": "{chosen:.1%}"}, [row | {"of": task(row)} for row in floor])
    return {"drift": pivot(caches, policy, columns), "drift_floor": lines}
