"""Answers of an embedded model to held-out examples: right ones, forwards, speed, bytes; a row a task."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from baselines.matches import TRANSFORMERS
from measuring.worker import RefusedError, refusing
from training import tasks

import tiered
from tiered.core.checks import unknown_name
from tiered.output import GenerationOutput
from tiered.runtime import Runtime
from workloads.scoring import score_examples

OF = ("task", "size")
TIMED = ("tokens_per_second", "ms_per_forward", "first_block_ms", "copy_ms", "hidden_ms", "exposed_ms", "seconds")


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A row for each of `settings["tasks"]`, which are [task, tokens of a lookup's prompt or None, examples].

    Beside them `settings` has "model", "policy", its "options", and "call" (options of `generate`). Words behind a
    comma in "policy" tell measurements of one policy apart, or name a cache of transformers. `settings` may have "base"
    (the policy, if "policy" is another name) and "split" (of the examples; "test"). It may have "batch" (sequences of a
    call) and "budget" (bytes of the device tier). `paths`: paths of the models.
    """
    with refusing():
        runtime = answerer(settings, paths)
    for task, size, count in settings["tasks"]:
        of = {"task": task, "size": size, "examples": count}
        try:
            with refusing():
                yield of | task_figures(runtime, settings, task, size, count)
        except RefusedError as error:
            yield of | {"status": "refused", "why": str(error)}


def answerer(settings: Mapping[str, Any], paths: Mapping[str, str]) -> Any:
    """A runtime, or a baseline with the same `generate`."""
    policy = settings.get("base", settings["policy"]).partition(",")[0]
    options = {"device": settings["device"]} | settings["options"]
    path, budget = paths[settings["model"]], settings.get("budget")
    if policy != "transformers":
        return tiered.from_pretrained(path, policy=policy, memory=budget, **options)
    from baselines.by_transformers import ByTransformers  # here: it imports another model

    return ByTransformers(tiered.from_pretrained(path, policy="none", **options), TRANSFORMERS[settings["policy"]])


def task_figures(runtime: Any, settings: Mapping[str, Any], task: str, size: int | None, count: int) -> dict[str, Any]:
    """Figures of the first `count` examples from the seed on, after a warm-up. "right" has 1 or 0 for each, in their
    order, so that policies can be paired on examples that both were asked. "bytes" is "counted" for weights and cached
    tensors alone, without activations, and "booked" for bytes of a ledger."""
    seed, watch = settings["seed"], Tally()
    split = settings.get("split", "test")
    examples = [tasks.sample(task, split, seed + number, size=size) for number in range(count)]
    options = {"seed": seed, "batch": settings.get("batch")} | settings["call"]
    # The first call of a kind pays for thread pools and the math library's workspaces.
    score_examples(runtime, examples[:1], **options)
    began = time.perf_counter()
    scores = score_examples(runtime, examples, watch=watch, **options)
    return {
        "correct": scores.correct,
        "right": "".join(str(int(right)) for right in scores.right),
        "nfe": statistics.fmean(scores.forwards),
        "tokens_per_forward": statistics.fmean(scores.tokens_per_forward),
        "seconds": time.perf_counter() - began,
        "bytes": "booked" if isinstance(runtime, Runtime) else "counted",
    } | watch.figures()


class Tally:
    """Sums over calls of `generate`; bytes are the largest of any call."""

    def __init__(self) -> None:
        self._sums, self._passes = defaultdict[str, float](float), Counter[str]()
        self._device = self._host = 0

    def __call__(self, out: GenerationOutput) -> None:
        """Count one call."""
        ways = () if out.tiers is None else out.tiers.ways.values()
        counts = {
            "calls": 1,
            "tokens": out.timings.tokens,
            "seconds": out.timings.total,
            "first_block": out.timings.first_block,
            "forwards": len(out.timings.steps),
            "rows": sum(out.rows_per_step),
            "columns": out.sequences.shape[1] * len(out.rows_per_step),
            "copy_ms": sum(way.busy_ns for way in ways) / 1e6,
            "hidden_ms": sum(way.hidden_ns for way in ways) / 1e6,
            "exposed_ms": sum(way.exposed_ns for way in ways) / 1e6,
        }
        for name, value in (counts | dict(out.memory.moved)).items():
            self._sums[name] += value
        self._passes.update(out.steps_by_kind)
        self._device = max(self._device, out.memory.peak_device_bytes)
        self._host = max(self._host, out.memory.peak_host_bytes)

    def figures(self) -> dict[str, Any]:
        """Columns of a row. "rows_per_forward": recomputed rows of a sequence, on average; "cache_ratio": the share of
        a full pass's rows that were not recomputed; "passes": forwards by kind. Copies have their time in all
        directions, the time that compute hid, and the time that it waited."""
        sums = self._sums
        return {name: sums[name] for name in ("copy_ms", "hidden_ms", "exposed_ms")} | {
            "tokens_per_second": sums["tokens"] / sums["seconds"],
            "ms_per_forward": 1e3 * sums["seconds"] / sums["forwards"],
            "first_block_ms": 1e3 * sums["first_block"] / sums["calls"],
            "rows_per_forward": sums["rows"] / sums["forwards"],
            "cache_ratio": 1 - sums["rows"] / sums["columns"],
            "passes": dict(self._passes),
            "device_bytes": self._device,
            "host_bytes": self._host,
            "to_device_bytes": int(sums["host->device"]),
            "to_host_bytes": int(sums["device->host"]),
        }


def tasks_of(texts: Iterable[str], context: int | None = None) -> list[list[Any]]:
    """The tasks of a point, from TASK:COUNT or TASK@TOKENS:COUNT. `context`: tokens of a lookup's prompt by default.

    Raises:
        ValueError: names the text and what is allowed.
    """
    found = []
    for text in texts:
        name, _, count = text.partition(":")
        task, at, size = name.partition("@")
        if task not in tasks.ALL_TASKS:
            raise unknown_name("task", task, tasks.ALL_TASKS)
        if not count.isdecimal() or int(count) < 1 or (at and not size.isdecimal()):
            raise ValueError(f"examples {text!r}; TASK:COUNT or TASK@TOKENS:COUNT, with a count from 1, is allowed")
        found.append([task, int(size) if at else context if task == "lookup" else None, int(count)])
    return found
