"""Books: what a trace of torch's profiler says of a call, by what its forwards were for. No tensors.

The format is Chrome's, as Kineto writes it (pytorch/kineto, `output_json.cpp` and `CuptiActivity.cpp`): complete events
("X") with µs, whose category is `user_annotation` for our ranges, `cuda_runtime` and `cuda_driver` for what the host
called, and `kernel`, `gpu_memcpy` and `gpu_memset` for what the device did. What the device did has the `correlation`
of the call that asked for it, and by that call it belongs to a step, whenever it ran.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]  # begin and end, µs

HOST = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Calls in which the host stands still: for the device, or for the driver to map or unmap memory.
BLOCKING = frozenset(
    (
        *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
        *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
        *("cudaMemcpy", "cudaMemcpy2D", "cudaMemset", "cudaMalloc", "cudaFree"),
        *("cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister", "cudaHostUnregister"),
        *("cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"),
    )
)
NAME = 120  # letters of a kernel's name: the rest are template arguments
TOP = 10


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """What the device did: in which step (None: in none) and layer, and whether on the stream that computes."""

    category: str
    name: str
    span: Interval
    nbytes: int
    step: int | None
    in_layer: bool
    computes: bool


class Ranges:
    """Ranges of one name that do not overlap, to be found by a moment."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.spans: list[Interval] = sorted(map(_span, events))
        self._began = [began for began, _ in self.spans]

    def at(self, moment: float) -> int | None:
        """The number of the range that is under way at `moment`; None: none is."""
        number = bisect_right(self._began, moment) - 1
        return number if number >= 0 and moment <= self.spans[number][1] else None


class ProfiledCall:
    """A call of `generate` under the profiler.

    Attributes:
        kinds: what the forward of each step was for.
        device: what the device did.
        unclaimed: events of the device whose call is not in the trace.
    """

    def __init__(self, trace: Mapping[str, Any], kinds: Sequence[str]) -> None:
        """Raises `ValueError` where the trace has not as many steps as `kinds`."""
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        named = [event for event in events if event.get("cat") == "user_annotation"]
        self.steps = Ranges(event for event in named if event["name"] == "step")
        self._forwards = Ranges(event for event in named if event["name"] == "forward")
        self._layers = Ranges(event for event in named if event["name"].startswith("layer/L"))
        self.kinds = list(kinds)
        if len(self.steps.spans) != len(self.kinds):
            raise ValueError(f"the trace has {len(self.steps.spans)} steps, the call had {len(self.kinds)}")
        threads = {event["tid"] for event in named if event["name"] == "step"}
        calls = [event for event in events if event.get("cat") in HOST]
        # Threads of the lanes are there to wait. Where no call is of the thread that steps, they are named otherwise.
        ours = [event for event in calls if event["tid"] in threads] or calls
        self._blocking = [event for event in ours if event["name"].split("_v")[0] in BLOCKING]
        asked = {event["args"]["correlation"]: event["ts"] for event in calls if "correlation" in event.get("args", {})}
        did = [event for event in events if event.get("cat") in DEVICE]
        streams = Counter(event["args"].get("stream") for event in did if event["cat"] == "kernel")
        compute = streams.most_common(1)[0][0] if streams else None
        self.device = [self._device_event(event, asked, compute) for event in did]
        self.unclaimed = sum(event["args"].get("correlation") not in asked for event in did)

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """Means over the steps of each kind. `busy_ms`: the stream that computes has something to do; `waits`: calls
        that block the thread that steps."""
        return {kind: self._of_kind(kind) for kind in dict.fromkeys(self.kinds)}

    def fetches(self) -> dict[str, Any]:
        """Copies to the device beside the stream that computes, by the copy engine or a kernel: their time, and the
        share of it in which a kernel computes."""
        spans = [
            event.span
            for event in self.device
            if not event.computes and (event.category == "kernel" or " HtoD" in event.name)
        ]
        kernels = union(event.span for event in self.device if event.category == "kernel" and event.computes)
        busy = union(spans)
        total = length(busy)
        return {"copies": len(spans), "ms": _ms(total)} | (
            {"under_kernels_share": round(length(common(busy, kernels)) / total, 4)} if total else {}
        )

    def top_kernels(self) -> list[dict[str, Any]]:
        """The kernels with most time, of all steps."""
        times: dict[str, list[float]] = defaultdict(list)
        for event in self.device:
            if event.category == "kernel" and event.step is not None:
                times[event.name[:NAME]].append(event.span[1] - event.span[0])
        total = sum(map(sum, times.values()))
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
        return [
            {"name": name, "count": len(each), "ms": _ms(sum(each)), "share": round(sum(each) / total, 4)}
            for name, each in longest
            if total
        ]

    def _of_kind(self, kind: str) -> dict[str, Any]:
        steps = [number for number, of in enumerate(self.kinds) if of == kind]
        of_kind, count = set(steps), len(steps)
        events = [event for event in self.device if event.step in of_kind]
        computing = [event for event in events if event.computes]
        kernels = [event for event in computing if event.category == "kernel"]
        busy = sum(length(union(event.span for event in computing if event.step == step)) for step in steps)
        wall = sum(end - began for began, end in (self.steps.spans[step] for step in steps))
        moved: dict[str, list[int]] = defaultdict(list)
        for event in events:
            if event.category != "kernel":
                moved[event.name].append(event.nbytes)
        calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in self._blocking:
            if self.steps.at(event["ts"]) in of_kind:
                calls[event["name"]].append(_span(event))
        begins = [began for each in calls.values() for began, _ in each]
        return {
            "steps": count,
            "wall_ms": _ms(wall / count),
            "busy_ms": _ms(busy / count),
            "kernels": _mean(len(kernels), count),
            "kernels_in_layers": _mean(sum(event.in_layer for event in kernels), count),
            "copies": {
                name: {"count": _mean(len(each), count), "bytes": _mean(sum(each), count)}
                for name, each in sorted(moved.items())
            },
            "blocking_calls": {
                name: {"count": _mean(len(each), count), "ms": _ms(sum(end - began for began, end in each) / count)}
                for name, each in sorted(calls.items())
            },
            "waits_in_forward": _mean(sum(self._forwards.at(moment) is not None for moment in begins), count),
            "waits_in_layers": _mean(sum(self._layers.at(moment) is not None for moment in begins), count),
        }

    def _device_event(self, event: Mapping[str, Any], asked: Mapping[int, float], compute: int | None) -> DeviceEvent:
        moment = asked.get(event["args"].get("correlation"))
        return DeviceEvent(
            category=event["cat"],
            name=event["name"],
            span=_span(event),
            nbytes=event["args"].get("bytes", 0),
            step=None if moment is None else self.steps.at(moment),
            in_layer=moment is not None and self._layers.at(moment) is not None,
            computes=event["args"].get("stream") == compute,
        )


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The same moments without overlaps, in order."""
    merged: list[Interval] = []
    for began, end in sorted(spans):
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((began, end))
    return merged


def common(one: Sequence[Interval], other: Sequence[Interval]) -> Iterator[Interval]:
    """Moments that are in both, each without overlaps and in order."""
    place = 0
    for began, end in one:
        while place < len(other) and other[place][1] <= began:
            place += 1
        at = place
        while at < len(other) and other[at][0] < end:
            yield max(began, other[at][0]), min(end, other[at][1])
            at += 1


def length(spans: Iterable[Interval]) -> float:
    """µs of all of them."""
    return sum(end - began for began, end in spans)


def _span(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event.get("dur", 0)


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 4)


def _mean(total: float, count: int) -> float:
    return round(total / count, 2)
