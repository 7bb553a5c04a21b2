"""What one process measures: every task of one point, after a warm-up of its own."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from scoring import score_examples
from tally import Tally

import tiered
from tiered.core.errors import TierCapacityError
from tiered.embedded import tasks
from tiered.output import GenerationOutput
from tiered.runtime import Runtime

# What the library says no with, before it does any work.
REFUSALS = (TierCapacityError, ValueError, TypeError)


class Watch(Tally):
    """The tally of a row: times of forwards and first blocks in ms, and of copies in all directions, beside the rest.

    Attributes:
        forward_ms: of every forward.
        first_block_ms: of every call.
        copy_ms, hidden_ms, exposed_ms: of all copies; those with compute going on meanwhile; those waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward_ms: list[float] = []
        self.first_block_ms: list[float] = []
        self.copy_ms = self.hidden_ms = self.exposed_ms = 0.0

    def __call__(self, out: GenerationOutput) -> None:
        super().__call__(out)
        self.forward_ms += [1e3 * seconds for seconds in out.timings.steps]
        self.first_block_ms.append(1e3 * out.timings.first_block)
        for way in () if out.tiers is None else out.tiers.ways.values():
            self.copy_ms += way.busy_ns / 1e6
            self.hidden_ms += way.hidden_ns / 1e6
            self.exposed_ms += way.exposed_ns / 1e6


def measure_point(settings: Mapping[str, Any], model: str) -> list[dict[str, Any]]:
    """A row for each task: `status`, `why`, `task`, and the figures; the columns that say of which point are not there.

    `settings`: those of a `Point`; `model`: what `from_pretrained` takes.
    """
    torch.set_num_threads(settings["threads"])
    try:
        runtime = tiered.from_pretrained(
            model,
            policy=settings["policy"],
            memory=settings["budget_bytes"],
            device=settings["device"],
            **settings["policy_options"],
        )
    except REFUSALS as error:
        return [refused(task, error) for task in settings["tasks"]]
    rows = []
    for task, examples in settings["tasks"].items():
        try:
            rows.append(measure_task(runtime, settings, task, examples))
        except REFUSALS as error:
            rows.append(refused(task, error))
    return rows


def measure_task(runtime: Runtime, settings: Mapping[str, Any], task: str, count: int) -> dict[str, Any]:
    """The row of one task, over the first `count` examples of the test split from the seed on."""
    size = settings["context"] if task == "lookup" else None
    seed = settings["seed"]
    examples = [tasks.sample(task, "test", seed + number, size=size) for number in range(count)]
    options = {name: settings[name] for name in ("max_new_tokens", "block_length", "seed", "batch")}
    if settings["confidence"] is not None:
        options["confidence_threshold"] = settings["confidence"]
    # The first call of a kind pays for thread pools and the math library's workspaces.
    score_examples(runtime, examples[:1], **options)
    watch = Watch()
    began = time.perf_counter()
    scores = score_examples(runtime, examples, watch=watch, **options)
    seconds = time.perf_counter() - began
    return {
        "status": "ok",
        "why": None,
        "task": task,
        "examples": scores.examples,
        "correct": scores.correct,
        "exact_match": scores.exact_match,
        "nfe": scores.mean_forwards,
        "tokens_per_forward": scores.mean_tokens_per_forward,
        "tokens_per_second": watch.tokens / watch.seconds,
        "ms_per_forward": sum(watch.forward_ms) / len(watch.forward_ms),
        "first_block_ms": sum(watch.first_block_ms) / len(watch.first_block_ms),
        "updates": watch.updates,
        "device_bytes": watch.device,
        "host_bytes": watch.host,
        "to_device_bytes": watch.moved["host->device"],
        "to_host_bytes": watch.moved["device->host"],
        "copy_ms": watch.copy_ms,
        "hidden_ms": watch.hidden_ms,
        "exposed_ms": watch.exposed_ms,
        "seconds": seconds,
    }


def refused(task: str, error: Exception) -> dict[str, Any]:
    """The row of a call that the library says no to."""
    return {"status": "refused", "why": str(error) or type(error).__name__, "task": task}
