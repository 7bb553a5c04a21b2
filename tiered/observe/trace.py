"""A call under torch's profiler: our ranges, our copies and waits beside them, and the time of each operation.

Sources: "Trace Event Format" (Google, 2016): complete events ("X") with µs, and metadata events ("M") for names. Kineto
writes our ranges with the category `user_annotation`. A kernel has the `correlation` of the call that launched it.
"""

import gzip
import json
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from tiered.core.byte_size import format_bytes
from tiered.core.events import CopyEnded, Waited
from tiered.core.ops import CONTAINERS, Op
from tiered.core.spans import Recorder, Span, recording
from tiered.core.whole_file import write_then_rename
from tiered.inputs import Inputs
from tiered.offload.lane import Lane
from tiered.output import GenerationOutput
from tiered.runtime import Runtime

_TRACKS = {"waits": 1} | {f"copy: {lane}": number for number, lane in enumerate(Lane, 2)}
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A call and its trace.

    Attributes:
        out: what `Runtime.generate` returned.
        kinds: the kind of each step.
        trace: the profile in Chrome's format, with tracks for copies and waits.
    """

    out: GenerationOutput
    kinds: list[str]
    trace: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OpTime:
    """The ranges of one operation.

    Attributes:
        op: the operation.
        ns: host time of the ranges, without ranges inside them.
        device_ns: device time of the kernels and copies that they launched; 0 on a CPU.
        count: number of ranges.
    """

    op: Op
    ns: int
    device_ns: int
    count: int


class _Marking(Recorder):
    """Makes every range one of the profiler's. `steps`: the times at which steps began, ns of `time.monotonic_ns`."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self._marks: list[AbstractContextManager[Any]] = []

    def enter(self, span: Span) -> None:
        super().enter(span)
        self._marks.append(record_function(span.name))
        if span.op is Op.STEP:
            self.steps.append(time.monotonic_ns())
        self._marks[-1].__enter__()

    def leave(self, span: Span) -> None:
        self._marks.pop().__exit__(None, None, None)
        super().leave(span)


def trace_call(runtime: Runtime, inputs: Inputs, **options: Any) -> TracedCall:
    """`runtime.generate(inputs, **options)` under torch's profiler.

    Raises:
        TierCapacityError, TypeError, ValueError: as `Runtime.generate`.
    """
    recorder, activities = _Marking(), [ProfilerActivity.CPU]
    if runtime.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler, recording(recorder):
        out = runtime.generate(inputs, **options)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    add_copies(trace, recorder, recorder.steps)
    return TracedCall(out=out, kinds=recorder.kinds, trace=trace)


def add_copies(trace: dict[str, Any], recorder: Recorder, steps: list[int]) -> None:
    """Add the copies and waits of `recorder` to `trace`, and the step's number and kind to every range.

    Args:
        trace: a profile, which is changed.
        recorder: of the same call.
        steps: times at which the steps began, in ns of the clock of the copies.
    """
    ranges = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    began = sorted(event["ts"] for event in ranges if event["name"] == Op.STEP)
    # The profiler has a clock of its own. A step begins on it right after the other clock was read.
    offset = min((ts - ns / 1000 for ts, ns in zip(began, steps, strict=True)), default=0.0)
    added = [*_waits(recorder.waits, offset), *_copies(recorder.copies, offset)]
    for event in ranges + added:
        forward = bisect_right(began, event["ts"]) - 1
        if forward >= 0:
            event.setdefault("args", {}).update(forward=forward, kind=recorder.kinds[forward])
    used = {event["tid"] for event in added} | {_TRACKS["waits"]}
    trace["traceEvents"] += [*_names({name: tid for name, tid in _TRACKS.items() if tid in used}), *added]


def _names(tracks: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": "tiered", "tid": 0, "name": "process_name", "args": {"name": "tiered"}}
    for name, tid in tracks.items():
        yield {"ph": "M", "pid": "tiered", "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": "tiered", "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _waits(waits: list[Waited], offset: float) -> Iterator[dict[str, Any]]:
    for wait in waits:
        if wait.exposed_ns:
            event = _event("wait", f"wait for {wait.lane}", wait.layer, "waits", {"late": wait.late})
            yield event | {"ts": wait.began / 1000 + offset, "dur": wait.exposed_ns / 1000}


def _copies(copies: list[CopyEnded], offset: float) -> Iterator[dict[str, Any]]:
    for copy in copies:
        queued_us = (copy.started - copy.submitted) / 1000
        args = {"bytes": copy.nbytes, "pieces": copy.copies, "queued_us": queued_us, "failed": copy.failed}
        event = _event("copy", copy.lane.value, copy.layer, f"copy: {copy.lane}", args)
        yield event | {"ts": copy.started / 1000 + offset, "dur": (copy.ended - copy.started) / 1000}


def _event(category: str, name: str, layer: int | None, track: str, args: dict[str, Any]) -> dict[str, Any]:
    name = name if layer is None else f"{name}/L{layer}"
    return {"ph": "X", "cat": category, "name": name, "pid": "tiered", "tid": _TRACKS[track], "args": args}


def op_times(trace: Mapping[str, Any]) -> list[OpTime]:
    """The operations of `trace`, those with the most host time first; `CONTAINERS` are left out."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_device = defaultdict[int, float](float)  # µs by correlation
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            on_device[event["args"].get("correlation", -1)] += event["dur"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    threads = {event["tid"] for event in ranges}  # the threads of the lanes launch copies too
    launches = [event for event in events if event.get("cat") in _LAUNCHES and event["tid"] in threads]
    host, device, count = defaultdict[str, float](float), defaultdict[str, float](float), defaultdict[str, int](int)
    inside: list[tuple[str, float]] = []  # the open ranges: operation and end
    for event in sorted(ranges + launches, key=lambda event: (event["ts"], -event["dur"])):
        while inside and inside[-1][1] <= event["ts"]:
            inside.pop()
        if event["cat"] == "user_annotation":
            op = event["name"].partition("/")[0]
            host[op] += event["dur"]
            count[op] += 1
            if inside:
                host[inside[-1][0]] -= event["dur"]
            inside.append((op, event["ts"] + event["dur"]))
        elif inside:
            device[inside[-1][0]] += on_device[event["args"].get("correlation", -1)]
    times = [
        OpTime(op, round(1000 * host[op]), round(1000 * device[op]), count[op])
        for op in Op
        if count[op] and op not in CONTAINERS
    ]
    return sorted(times, key=lambda op: -op.ns)


def trace_report(call: TracedCall) -> str:
    """Time by operation beside the wall clock, and of copies the hidden and the exposed time."""
    seconds, times, tiers = call.out.timings.total, op_times(call.trace), call.out.tiers
    share = sum(each.ns for each in times) / 1e9 / seconds
    lines = [
        f"{1000 * seconds:.1f} ms in {len(call.kinds)} forwards, {100 * share:.1f} % of it in operations:",
        f"{'operation':<14}{'ms':>10}{'share':>9}{'device':>9}{'ranges':>9}",
    ]
    for each in times:
        ms = f"{each.ns / 1e6:>10.2f}{100 * each.ns / 1e9 / seconds:>7.1f} %{each.device_ns / 1e6:>9.2f}"
        lines.append(f"{each.op:<14}{ms}{each.count:>9}")
    moved = [] if tiers is None else [(lane, stats) for lane, stats in tiers.ways.items() if stats.jobs]
    if moved:
        lines.append(f"{'copies':<14}{'bytes':>10}{'ms':>9}{'hidden':>9}{'exposed':>9}{'waits':>7}")
    for lane, stats in moved:
        times_ms = "".join(f"{ns / 1e6:>9.2f}" for ns in (stats.busy_ns, stats.hidden_ns, stats.exposed_ns))
        lines.append(f"{lane:<14}{format_bytes(stats.nbytes):>10}{times_ms}{stats.late:>7}")
    return "\n".join(lines)


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write `trace` as a whole or not at all, under gzip if the name ends in .gz.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(trace, allow_nan=False, separators=(",", ":")).encode()
    zipped = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    write_then_rename(path, lambda part: part.write_bytes(zipped))
