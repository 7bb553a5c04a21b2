"""A call under torch's profiler: ranges of operations, copies and waits, and the time of each operation.

Source: "Trace Event Format" (Google, 2016): complete events ("X") with µs, and metadata events ("M") for names.
"""

import gzip
import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from tiered.core.byte_size import format_bytes
from tiered.core.events import CopyEnded, TierEvent, Waited
from tiered.core.ops import CONTAINERS, Op
from tiered.core.spans import Recorder, TimedRange, recording
from tiered.core.whole_file import write_then_rename
from tiered.inputs import Inputs
from tiered.offload.lane import Lane
from tiered.output import GenerationOutput
from tiered.runtime import Runtime

# Categories of Kineto: a kernel has the `correlation` of the call that launched it.
_LAUNCHES, _ON_DEVICE = {"cuda_runtime", "cuda_driver"}, {"kernel", "gpu_memcpy", "gpu_memset"}
_TRACKS = {"waits": 1} | {f"copy: {lane}": number for number, lane in enumerate(Lane, 2)}


@dataclass(frozen=True, slots=True)
class OpTime:
    """Time in one operation's ranges, without ranges nested in them."""

    op: Op
    us: float  # µs of the host
    device_us: float  # µs of the kernels launched in them; 0 on a CPU
    count: int  # number of ranges


@dataclass(frozen=True, slots=True)
class TracedCall:
    out: GenerationOutput
    kinds: list[str]  # kind of each step
    ops: list[OpTime]  # longest first
    trace: dict[str, Any]  # the profile in Chrome's format, with tracks for copies and waits


class _Marking(Recorder):
    """Reports every range to the profiler. `steps`: start times of steps, ns of `time.monotonic_ns`."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self._marks: list[AbstractContextManager[Any]] = []

    def enter(self, span: TimedRange) -> None:
        super().enter(span)
        self._marks.append(record_function(span.op.value if span.layer is None else f"{span.op.value}/L{span.layer}"))
        if span.op is Op.STEP:
            self.steps.append(time.monotonic_ns())
        self._marks[-1].__enter__()

    def leave(self, span: TimedRange) -> None:
        self._marks.pop().__exit__(None, None, None)
        super().leave(span)


def trace_call(runtime: Runtime, inputs: Inputs, **options: Any) -> TracedCall:
    """`runtime.generate(inputs, **options)` under torch's profiler. Raises as `Runtime.generate`."""
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
    return TracedCall(out, recorder.kinds, op_times(trace["traceEvents"]), trace)


def add_copies(trace: dict[str, Any], recorder: Recorder, steps: list[int]) -> None:
    """Add the copies and waits of `recorder` to `trace`, the profile of the same call, and the step's number and kind
    to every range. `steps`: start times of steps, ns of the copies' clock."""
    ranges = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    began = sorted(event["ts"] for event in ranges if event["name"] == Op.STEP)
    # The profiler has its own clock. A step's range begins there right after the other clock was read.
    offset = min((ts - ns / 1000 for ts, ns in zip(began, steps, strict=True)), default=0.0)
    added = [each for event in recorder.events if (each := _on_track(event, offset)) is not None]
    for event in ranges + added:
        forward = bisect_right(began, event["ts"]) - 1
        if forward >= 0:
            event.setdefault("args", {}).update(forward=forward, kind=recorder.kinds[forward])
    names = [("process_name", 0, "tiered"), *(("thread_name", tid, name) for name, tid in _TRACKS.items())]
    used = {0, *(event["tid"] for event in added)}
    trace["traceEvents"] += [
        {"ph": "M", "pid": "tiered", "tid": tid, "name": what, "args": {"name": name}}
        for what, tid, name in names
        if tid in used
    ] + added


def _on_track(event: TierEvent, offset: float) -> dict[str, Any] | None:
    """`event` in Chrome's format; None for an event without a track. `offset`: µs from our clock to the profiler's."""
    match event:
        case CopyEnded():
            track, name, began = f"copy: {event.lane}", event.lane.value, event.started
            queued = (event.started - event.submitted) / 1000
            args = {"bytes": event.nbytes, "pieces": event.copies, "queued_us": queued, "failed": event.failed}
        case Waited() if event.exposed_ns:
            track, name, began, args = "waits", f"wait for {event.lane}", event.began, {"late": event.late}
        case _:
            return None
    return {
        "ph": "X",
        "cat": track.partition(":")[0],
        "name": name if event.layer is None else f"{name}/L{event.layer}",
        "pid": "tiered",
        "tid": _TRACKS[track],
        "ts": began / 1000 + offset,
        "dur": (event.ended - began) / 1000,
        "args": args,
    }


def op_times(events: Iterable[Mapping[str, Any]]) -> list[OpTime]:
    """The operations of a profile, longest first, without `CONTAINERS`. `events`: in Chrome's format."""
    host, device, count, launched = Counter[str](), Counter[str](), Counter[str](), Counter[Any]()
    timed = [event for event in events if event.get("cat") in {"user_annotation", *_LAUNCHES, *_ON_DEVICE}]
    for event in timed:
        if event["cat"] in _ON_DEVICE:
            launched[event["args"].get("correlation")] += event["dur"]
    threads = {event["tid"] for event in timed if event["cat"] == "user_annotation"}  # a lane's thread launches copies
    ours = [event for event in timed if event["cat"] not in _ON_DEVICE and event["tid"] in threads]
    inside: list[tuple[str, float]] = []  # the open ranges: operation and end
    for event in sorted(ours, key=lambda event: (event["ts"], -event["dur"])):
        while inside and inside[-1][1] <= event["ts"]:
            inside.pop()
        outer = inside[-1][0] if inside else ""
        if event["cat"] in _LAUNCHES:
            device[outer] += launched[event["args"].get("correlation")]
        else:
            op = event["name"].partition("/")[0]
            inside.append((op, event["ts"] + event["dur"]))
            host[op], host[outer], count[op] = host[op] + event["dur"], host[outer] - event["dur"], count[op] + 1
    ops = sorted((op for op in Op if op not in CONTAINERS and count[op]), key=lambda op: -host[op])
    return [OpTime(op, host[op], device[op], count[op]) for op in ops]


def trace_report(call: TracedCall) -> str:
    """A table of the time by operation beside wall-clock time, and of the copies' hidden and exposed time."""
    wall, tiers = 1000 * call.out.timings.total, call.out.tiers
    share = sum(each.us for each in call.ops) / 10 / wall
    lines = [
        f"{wall:.1f} ms in {len(call.kinds)} forwards, {share:.1f} % of it in operations:",
        f"{'operation':<14}{'ms':>10}{'share':>9}{'device':>9}{'ranges':>9}",
    ]
    for each in call.ops:
        times_ms = f"{each.us / 1000:>10.2f}{each.us / 10 / wall:>7.1f} %{each.device_us / 1000:>9.2f}"
        lines.append(f"{each.op:<14}{times_ms}{each.count:>9}")
    moved = [] if tiers is None else [(lane, stats) for lane, stats in tiers.ways.items() if stats.jobs]
    if moved:
        lines.append(f"{'copies':<14}{'bytes':>10}{'ms':>9}{'hidden':>9}{'exposed':>9}{'waits':>7}")
    for lane, stats in moved:
        times_ms = "".join(f"{ns / 1e6:>9.2f}" for ns in (stats.busy_ns, stats.hidden_ns, stats.exposed_ns))
        lines.append(f"{lane:<14}{format_bytes(stats.nbytes):>10}{times_ms}{stats.late:>7}")
    return "\n".join(lines)


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write `trace` whole or not at all, with gzip if the name ends in .gz. Raises `OSError`."""
    text = json.dumps(trace, allow_nan=False, separators=(",", ":")).encode()
    zipped = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    write_then_rename(path, lambda part: part.write_bytes(zipped))
