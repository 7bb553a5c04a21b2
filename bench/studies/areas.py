"""Staleness of cached keys and values, their drift in a step, and attention, by area of the canvas.

Part `caches`: the distance (1 - cos) of a policy's cached keys and values from those of an uncached forward. Part
`steps`: the uncached model's own distance from one step to the next, and the attention of the current block's rows.
Examples are one batch. It takes about a minute.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from measuring.worker import refusing
from training import tasks
from workloads.answer_tables import Column, Show, pivot, where
from workloads.answers import answerer, tasks_of
from workloads.canvas_areas import MASSES, AreaFigures
from workloads.models import local, weights
from workloads.staleness import measure_staleness
from workloads.step_drift import measure_step_drift

from tiered.core.checks import unknown_name

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

OF, TIMED = ("layer", "area"), ()
AXES: Axes = {
    "model": ["embedded", "embedded-uniform"],
    "part": ["caches", "steps"],
    "policy": ["fast_dllm_dual"],
    "examples": ["sort:1", "reverse:1", "insert:1", "chain:1", "add:1", "lookup:1"],
}
QUICK: Axes = {"model": ["embedded"], "examples": ["sort:1"]}
CALL = {"max_new_tokens": 32, "block_length": 8, "stop_at_eos": False}
OWN_CALL = {"embedded-uniform": {"block_steps": 16}}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """The policies' caches of each model, then its steps, whose tokens `none` decides."""
    for model, part in product(axes["model"], axes["part"]):
        if part not in AXES["part"]:
            raise unknown_name("part", part, AXES["part"])
        call = CALL | OWN_CALL.get(model, {})
        for policy in axes["policy"] if part == "caches" else ["none"]:
            of = {"part": part, "policy": policy, "options": {}, "call": call, "tasks": tasks_of(axes["examples"])}
            yield weights(model) | of


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[Row]:
    """A row for each layer and area: means over the steps. An area without columns has no row."""
    chats, seed = [], settings["seed"]
    for name, size, count in settings["tasks"]:
        prompts = (tasks.sample(name, "test", seed + number, size=size).prompt for number in range(count))
        chats += [[{"role": "user", "content": prompt}] for prompt in prompts]
    with refusing():
        runtime = answerer(settings, paths)
        figures = measure_staleness if settings["part"] == "caches" else measure_step_drift
        found = figures(runtime, chats, seed=seed, **settings["call"])
    for layer, (area, name) in product(range(found.keys.shape[1]), enumerate(MASSES)):
        if row := _figures(found, layer, area):
            yield {"layer": layer, "area": name} | row


def _figures(found: AreaFigures, layer: int, area: int) -> Row:
    row: Row = {}
    if area < found.rows.shape[1] and found.rows[:, area].any():
        row = {name: float(found.by_layer(getattr(found, name))[layer, area]) for name in ("keys", "values")}
    if found.attention is not None and (share := float(found.attention[:, layer, area].mean())):
        row["attention"] = share
    return row


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`areas_caches`: a line for each layer; `areas_steps`: a line for each area, the mean over the layers."""
    seen = merged(rows, of=OF, timed=TIMED)
    caches, steps = ([row for row in seen if row["part"] == part] for part in ("caches", "steps"))
    by_area: dict[str, Column] = {
        area: (where(area=area), lambda own: f"{_distance('keys')(own)}; {_distance('values')(own)}")
        for area in MASSES
        if any(row.get("area") == area for row in caches)
    }
    by_model: dict[str, Column] = {
        f"`{model}`: {name}": (where(model=model), show)
        for model in dict.fromkeys(row["model"] for row in steps)
        for name, show in (("keys", _distance("keys")), ("values", _distance("values")), ("attention", _share))
    }
    ordered = [row for area in MASSES for row in steps if row.get("area", MASSES[0]) == area]
    return {
        "areas_caches": pivot(caches, lambda row: f"`{row['model']}`, layer {row.get('layer', 0)}", by_area),
        "areas_steps": pivot(ordered, lambda row: row.get("area", ""), by_model),
    }


def _distance(figure: str) -> Show:
    def shown(rows: Sequence[Row]) -> str:
        mean = np.mean([row.get(figure, np.nan) for row in rows])
        return "" if np.isnan(mean) else f"{mean:.2e}" if mean > 1e-9 else "0"

    return shown


def _share(rows: Sequence[Row]) -> str:
    return f"{100 * np.mean([row['attention'] for row in rows]):.1f} %"
