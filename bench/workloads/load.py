"""Many clients of one scheduler, each of which asks again when it is answered; and a request that runs while a long
prompt joins."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from measuring.worker import refusing
from torch import Tensor
from training import tasks

from tiered.prepare import PreparedCall
from tiered.runtime import Runtime
from tiered.serving import scheduler as scheduling
from tiered.serving.counts import Work
from tiered.serving.request import Request
from tiered.serving.scheduler import Scheduler
from workloads.subjects import RANDOM, loaded, prompts, variant_named

TOGETHER, IN_TURN, APART = "together", "one at a time", "no forward shared"
BLOCKS = "embedded-blocks"  # the embedded model that sees blocks
TIMED = (
    *("seconds", "requests_per_second", "tokens_per_second", "own_share", "first_p50_ms", "first_p99_ms"),
    *("end_p50_ms", "end_p99_ms", "gap_p50_ms", "gap_p99_ms", "gap_max_ms", "first_pass_ms"),
)
_UNCUT = 10**9
_LEAST = 256  # least prompt tokens of the task


@dataclass
class Watch:
    """A streamer that notes the times of forwards and of final blocks."""

    steps: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """The prompt, and then blocks."""
        self.blocks.append(time.monotonic())

    def put_open(self, value: Tensor, still: Tensor) -> None:
        """A forward has ended."""
        self.steps.append(time.monotonic())

    def end(self) -> None:
        """See `Streamer`."""


def clients(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A row with one request at a time, and one with all clients' requests together. Without a policy, it is that of
    the model, and there is a third row: all requests run, and each forward is of one alone."""
    with refusing():
        runtime = _runtime(settings, paths)
        calls = [_asked(runtime, settings, number) for number in range(settings["requests"])]
    served(runtime, calls[:2], clients=2, max_running=2)  # thread pools, and the math library's workspaces
    # The order changes nothing except the state of the machine; requests in turn would need rounds of their own.
    for way in (IN_TURN, TOGETHER) if "policy" in settings else (IN_TURN, APART, TOGETHER):
        most = 1 if way == IN_TURN else settings["clients"]
        share = scheduling.shareable if way != APART else lambda *_: False
        with patch.object(scheduling, "shareable", share):
            yield {"way": way} | served(runtime, calls, clients=settings["clients"], max_running=most)


def join(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Times between the steps of a request that runs while a prompt of `context` tokens has its first pass. With "rows"
    0 the pass is not cut."""
    with refusing():
        runtime = _runtime(settings, paths)
        scheduler = Scheduler(runtime, max_prefill_rows=settings["rows"] or _UNCUT)
        short, long = (
            _asked(runtime, {**settings, "context": context}, 0) for context in (_LEAST, settings["context"])
        )
    running, joining = Watch(), Watch()
    # Requests follow each other as long as the pass lasts, so that one runs at any time.
    begin: Callable[[Request | None], object] = lambda _: scheduler.submit(  # noqa: E731
        short, streamer=running, on_end=None if joining.steps else begin
    )
    begin(None)
    for _ in range(3):
        scheduler.step()
    began = time.monotonic()
    request = scheduler.submit(long, streamer=joining)
    while not joining.steps:
        scheduler.step()
    request.cancel()
    times = [began, *(each for each in running.steps if began < each < joining.steps[0]), joining.steps[0]]
    gaps = 1e3 * np.diff(times)
    scheduler.close(cancel=True)
    yield {
        "steps": len(times) - 2,
        "gap_p50_ms": float(np.percentile(gaps, 50)),
        "gap_p99_ms": float(np.percentile(gaps, 99)),
        "gap_max_ms": float(gaps.max()),
        "first_pass_ms": 1e3 * (joining.steps[0] - began),
    }


def _runtime(settings: Mapping[str, Any], paths: Mapping[str, str]) -> Runtime:
    policy = variant_named(settings["policy"]).make() if "policy" in settings else "auto"
    return loaded(settings, paths, settings["context"] + settings["answer"]).with_policy(policy)


def _asked(runtime: Runtime, settings: Mapping[str, Any], number: int) -> PreparedCall:
    """A call whose answer has several blocks, if it is that long; without "block", of the model's length."""
    call: dict[str, Any] = {"max_new_tokens": settings["answer"], "block_length": settings.get("block")}
    call |= {"stop_at_eos": False} if settings["model"] == RANDOM else {}
    rule = {} if settings["confidence"] is None else {"confidence_threshold": settings["confidence"]}
    seed = settings["seed"] + number
    if settings["model"] == RANDOM:
        asked = prompts({**settings, "seed": seed}, settings["context"])
    else:
        asked = tasks.sample("long_lookup", "test", seed, size=settings["context"]).prompt
    return runtime.prepare(asked, **call, **rule)


def served(runtime: Runtime, calls: list[PreparedCall], *, clients: int, max_running: int) -> dict[str, Any]:
    """Answer all calls, of which `clients` are asked at a time."""
    scheduler, left, done = Scheduler(runtime, max_running=max_running), [*reversed(calls)], list[Request]()
    watches: dict[int, Watch] = {}

    def ask(last: Request | None = None) -> None:
        if last is not None:
            done.append(last)
        if left:
            watch = Watch()
            watches[scheduler.submit(left.pop(), streamer=watch, on_end=ask).number] = watch

    began = time.monotonic()
    for _ in range(clients):
        ask()
    scheduler.run()
    seconds = time.monotonic() - began
    counts, clock = scheduler.counts, scheduler.counts.clock.seconds
    first = [1e3 * (watches[each.number].blocks[1] - each.arrived) for each in done]
    end = [1e3 * ((each.ended or 0) - each.arrived) for each in done]
    figures = {"tokens": counts.tokens, "forwards": counts.forwards, "seconds": seconds}
    figures |= {"requests_per_second": len(done) / seconds, "tokens_per_second": counts.tokens / seconds}
    figures |= {"forwards_per_token": counts.forwards / counts.tokens, "own_share": clock[Work.OWN] / seconds}
    for name, times in (("first", first), ("end", end)):
        figures |= {f"{name}_p{rank}_ms": float(np.percentile(times, rank)) for rank in (50, 99)}
    return figures
