"""Polestar beside the caches that it builds on: right answers, work, T, early commits, drift.

Parts: `table`, held-out tasks under each policy; `trigger`, what the update threshold T does to a task that hangs on
fresh looks at its prompt; `early`, what drift-aware commits do to it; `drift`, how far cached keys and values of the
prompt are from an uncached pass. `--share` takes fewer examples of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from workloads import answers
from workloads.answer_tables import Column, Show, mean, pivot, policy, right_of, size, task, where
from workloads.answers import OF, TIMED, answerer, tasks_of
from workloads.models import paths, weights

from tiered.embedded import tasks
from tiered.observe.analysis.reports import Area
from tiered.observe.analysis.token_drift import measure_token_drift

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

RULES: dict[str, dict[str, Any]] = {
    "one a step": {},
    "threshold 0.99": {"confidence_threshold": 0.99},
    "threshold 0.9": {"confidence_threshold": 0.9},
    "drift_aware 0.9": {"commit": "drift_aware", "confidence_threshold": 0.9},
    "two a step": {"steps": 16, "stop_at_eos": False},
}
PLAIN: dict[str, dict[str, Any]] = {name: {} for name in ("none", "fast_dllm_dual", "polestar", "polestar-window")}
RAW: dict[str, dict[str, Any]] = {"polestar, raw": {"codec": "raw"}}
DRIFTS: dict[str, dict[str, Any]] = {
    "fast_dllm_dual": {},
    "polestar, fp8": {"codec": "fp8"},
    "polestar": {},
    "polestar, raw, clusters by layer": {"codec": "raw", "cluster_layers": 1},
    "polestar, clusters by layer": {"cluster_layers": 1},
    "polestar-paper, raw": {"codec": "raw"},
}
SORT = (("sort:120", "threshold 0.99"), ("sort:120", "threshold 0.9"), ("sort:60", "one a step"))
OTHERS = tuple((examples, "threshold 0.9") for examples in ("chain:100", "lookup@224:40", "lookup@2016:6"))
# What is asked, and who answers. T 4 is the default.
PARTS = {
    "table": (SORT + OTHERS, PLAIN | RAW | {"polestar-paper": {}}),
    "trigger": (SORT, {f"polestar, T {number}": {"update_threshold": number} for number in (0, 1, 2, 8)}),
    "early": ((("sort:360", "threshold 0.9"), ("sort:360", "drift_aware 0.9")), PLAIN),
    "drift": ((("lookup@992:2", "two a step"), ("sort:2", "two a step")), DRIFTS | RAW),
}
AXES: Axes = {"model": ["embedded"], "part": [*PARTS], "share": [1.0]}
QUICK: Axes = {"share": [0.02], "part": ["trigger"]}


def local(axes: Axes) -> dict[str, Any]:
    """Where the models are."""
    return {"paths": paths(axes["model"])}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn for each question."""
    for model, part, share in product(axes["model"], axes["part"], axes["share"]):
        asks, contestants = PARTS[part]
        for (examples, rule), (name, options) in product(asks, contestants.items()):
            of = [[*what, max(1, round(share * count))] for *what, count in tasks_of([examples])]
            call = {"max_new_tokens": 32, "block_length": 32} | RULES[rule]
            own = {"part": part, "policy": name, "options": options, "rule": rule}
            yield weights(model) | own | {"call": call, "tasks": of}


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[Row]:
    """As `answers.measure`; of the part `drift`, the mean cosine distance of the prompt's keys and values over steps
    and layers, and what calls moved."""
    if settings["part"] != "drift":
        yield from answers.measure(settings, paths=paths)
        return
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
    """A table for each part."""
    seen = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]
    own = {part: [row for row in seen if row["part"] == part] for part in PARTS}
    shown: dict[str, Show] = {
        "right": right_of,
        "NFE": mean("nfe"),
        "TPF": mean("tokens_per_forward"),
        "tokens/s": mean("tokens_per_second", 0),
        "rows a forward": mean("rows_per_forward", 0),
        "device": size("device_bytes"),
        "host": size("host_bytes"),
        "moved": size("to_device_bytes", "to_host_bytes"),
    }
    sorts = {name: [row for row in own["table"] if where(task="sort", policy=name)(row)] for name in PLAIN}
    rules = {part: dict.fromkeys(row["rule"] for row in own[part]) for part in PARTS}
    drifts: dict[str, Column] = {}
    for name in dict.fromkeys(row["task"] for row in own["drift"]):
        drifts[f"{name}: values, 10⁻³"] = (where(task=name), lambda rows: f"{1e3 * rows[0]['values']:.2f}")
        drifts[f"{name}: moved"] = (where(task=name), size("moved_bytes"))
        drifts[f"{name}: repairs"] = (where(task=name), lambda rows: str(rows[0]["repairs"]))
    early = {"right": right_of, "NFE": mean("nfe", 3)}
    return {
        "polestar": pivot(
            own["table"],
            lambda row: f"{task(row)}, {row['rule']}: {policy(row)}",
            {name: (where(), show) for name, show in shown.items()},
        ),
        "trigger": pivot(
            sorts["none"] + own["trigger"] + sorts["polestar"] + sorts["fast_dllm_dual"],
            policy,
            {rule: (where(rule=rule), right_of) for rule in rules["trigger"]}
            | {"rows a forward, one a step": (where(rule="one a step"), mean("rows_per_forward", 1))},
        ),
        "early": pivot(
            own["early"],
            policy,
            {f"{rule}: {name}": (where(rule=rule), show) for rule in rules["early"] for name, show in early.items()},
        ),
        "drift": pivot(own["drift"], policy, drifts),
    }
