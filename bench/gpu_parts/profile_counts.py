"""Figures of a call from a trace of torch's profiler, by kind of forward; and that trace in a small file.

The format is Chrome's, as Kineto writes it (pytorch/kineto, `output_json.cpp` and `CuptiActivity.cpp`): complete events
("X") with µs. Their category is `user_annotation` for our ranges, `cuda_runtime` and `cuda_driver` for calls of the
host, and `kernel`, `gpu_memcpy` and `gpu_memset` for work of the device. Such work has the `correlation` of the call
that asked for it, and belongs to the step of that call, whenever it ran.
"""

import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tiered.core.whole_file import write_then_rename

Interval = tuple[float, float]  # begin and end, µs

_HOST = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Calls in which the host stands still: for the device, or for the driver to map or unmap memory.
_BLOCKING = frozenset(
    (
        *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
        *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
        *("cudaMemcpy", "cudaMemcpy2D", "cudaMemset", "cudaMalloc", "cudaFree"),
        *("cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister", "cudaHostUnregister"),
        *("cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"),
    )
)
_NAME = 120  # letters of a kernel's name: the rest are template arguments
_TOP = 10
_MOST_BYTES = 12 << 20  # most bytes of a trace's file, which then fits a repository
# Operators of torch are ten times as many as other events; our ranges say what they are part of.
_DROPPED = frozenset({"cpu_op", "python_function", "overhead", "fwdbwd", "Trace", "gpu_user_annotation"})
_ARGS = ("stream", "correlation", "bytes", "grid", "block", "name", "sort_index", "labels")


class DeviceEvent(NamedTuple):
    """Work of the device, the number of its step (None for no step), and whether it is in a layer, and computes."""

    category: str
    name: str
    span: Interval
    nbytes: int
    step: int | None
    in_layer: bool
    computes: bool


class ProfiledCall:
    """A call of `generate` under the profiler: the `kinds` of its forwards, by step, and the work of the `device`.
    `unclaimed`: number of its events whose call is not in the trace."""

    def __init__(self, trace: Mapping[str, Any], kinds: Sequence[str]) -> None:
        """Raises `ValueError` if the trace has not as many steps as `kinds`."""
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        named = [event for event in events if event.get("cat") == "user_annotation"]
        self._steps = sorted(_span(event) for event in named if event["name"] == "step")
        self._forwards = sorted(_span(event) for event in named if event["name"] == "forward")
        self._layers = sorted(_span(event) for event in named if event["name"].startswith("layer/L"))
        self.kinds = list(kinds)
        if len(self._steps) != len(self.kinds):
            raise ValueError(f"the trace has {len(self._steps)} steps, the call had {len(self.kinds)}")
        threads = {event["tid"] for event in named if event["name"] == "step"}
        calls = [event for event in events if event.get("cat") in _HOST]
        # Threads of the lanes are there to wait. If no call is of the thread that steps, threads have other names.
        ours = [event for event in calls if event["tid"] in threads] or calls
        self._blocking = [event for event in ours if event["name"].split("_v")[0] in _BLOCKING]
        asked = {event["args"]["correlation"]: event["ts"] for event in calls if "correlation" in event.get("args", {})}
        did = [event for event in events if event.get("cat") in _DEVICE]
        streams = Counter(event["args"].get("stream") for event in did if event["cat"] == "kernel")
        compute = streams.most_common(1)[0][0] if streams else None
        self.device = []
        for event in did:
            moment = asked.get(event["args"].get("correlation"), -1.0)  # in no range
            where = _at(self._steps, moment), _at(self._layers, moment) is not None
            computes = event["args"].get("stream") == compute
            nbytes = event["args"].get("bytes", 0)
            self.device.append(DeviceEvent(event["cat"], event["name"], _span(event), nbytes, *where, computes))
        self.unclaimed = sum(event["args"].get("correlation") not in asked for event in did)

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """Means over the steps of each kind. `busy_ms`: the stream that computes is busy; `waits_in_…`: number of calls
        that block the thread that steps."""
        return {kind: self._of_kind(kind) for kind in dict.fromkeys(self.kinds)}

    def fetches(self) -> dict[str, Any]:
        """Copies to the device beside the stream that computes: their time, and the share of it in which a kernel
        computes."""
        kernels = [event.span for event in self.device if event.category == "kernel" and event.computes]
        spans = [event.span for event in self.device if not event.computes and " HtoD" in event.name]
        total = covered(spans)
        under = total + covered(kernels) - covered([*spans, *kernels])
        share = {"under_kernels_share": round(under / total, 4)} if total else {}
        return {"copies": len(spans), "ms": _ms(total), **share}

    def top_kernels(self) -> list[dict[str, Any]]:
        """The kernels with most time, of all steps."""
        times: dict[str, list[float]] = defaultdict(list)
        for event in self.device:
            if event.category == "kernel" and event.step is not None:
                times[event.name[:_NAME]].append(event.span[1] - event.span[0])
        total = sum(map(sum, times.values()))
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:_TOP]
        return [
            {"name": name, "count": len(each), "ms": _ms(sum(each)), "share": round(sum(each) / total, 4)}
            for name, each in longest
            if total
        ]

    def _of_kind(self, kind: str) -> dict[str, Any]:
        steps = {number for number, of in enumerate(self.kinds) if of == kind}
        events = [event for event in self.device if event.step in steps]
        computing = [event for event in events if event.computes]
        kernels = [event for event in computing if event.category == "kernel"]
        busy = sum(covered(event.span for event in computing if event.step == step) for step in steps)
        moved, calls = defaultdict[str, list[int]](list), defaultdict[str, list[Interval]](list)
        for event in events:
            if event.category != "kernel":
                moved[event.name].append(event.nbytes)
        for event in self._blocking:
            if _at(self._steps, event["ts"]) in steps:
                calls[event["name"]].append(_span(event))
        begins = [began for each in calls.values() for began, _ in each]

        def mean(total: float) -> float:
            return round(total / len(steps), 2)

        def mean_ms(microseconds: float) -> float:
            return _ms(microseconds / len(steps))

        row: dict[str, Any] = {"steps": len(steps), "wall_ms": mean_ms(covered(self._steps[step] for step in steps))}
        row |= {"busy_ms": mean_ms(busy), "kernels": mean(len(kernels))}
        row["kernels_in_layers"] = mean(sum(event.in_layer for event in kernels))
        row["copies"] = {name: {"count": mean(len(of)), "bytes": mean(sum(of))} for name, of in sorted(moved.items())}
        row["blocking_calls"] = {
            name: {"count": mean(len(of)), "ms": mean_ms(sum(end - began for began, end in of))}
            for name, of in sorted(calls.items())
        }
        row["waits_in_forward"] = mean(sum(_at(self._forwards, moment) is not None for moment in begins))
        return row | {"waits_in_layers": mean(sum(_at(self._layers, moment) is not None for moment in begins))}


def covered(spans: Iterable[Interval]) -> float:
    """µs that are in at least one of `spans`."""
    total, until = 0.0, float("-inf")
    for began, end in sorted(spans):
        total += max(0.0, end - max(began, until))
        until = max(until, end)
    return total


def write_small_trace(path: Path, trace: Mapping[str, Any], *, most: int = _MOST_BYTES) -> dict[str, Any]:
    """Write `trace`, without needless events, under gzip to `path`. It is cut to its first half, quarter and so on
    until it takes at most `most` bytes. Returns columns for a row."""
    events = [_slim(event) for event in trace["traceEvents"] if event.get("cat") not in _DROPPED]
    timed = sorted(event["ts"] for event in events if event["ph"] != "M")
    kept = len(timed)
    while True:
        end = timed[kept - 1] if kept else 0
        part = [event for event in events if event["ph"] == "M" or event["ts"] <= end]
        text = json.dumps({"traceEvents": part, "displayTimeUnit": "ms"}, allow_nan=False, separators=(",", ":"))
        packed = gzip.compress(text.encode(), 6, mtime=0)
        if len(packed) <= most or not kept:
            break
        kept //= 2
    write_then_rename(path, lambda target: target.write_bytes(packed))
    return {"file": path.name, "bytes": len(packed), "events": len(part), "whole": kept == len(timed)}


def _slim(event: Mapping[str, Any]) -> dict[str, Any]:
    args = {name: value for name, value in event.get("args", {}).items() if name in _ARGS}
    return {**{name: value for name, value in event.items() if name != "args"}, **({"args": args} if args else {})}


def _at(spans: Sequence[Interval], moment: float) -> int | None:
    """The number of the one of `spans`, in order and without overlaps, that is under way at `moment`; None for none."""
    number = bisect_right(spans, moment, key=itemgetter(0)) - 1
    return number if number >= 0 and moment <= spans[number][1] else None


def _span(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event.get("dur", 0)


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 4)
