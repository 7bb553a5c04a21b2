"""Books: a recording in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

Source: "Trace Event Format" (Google, 2016): complete events ("X") with µs, and metadata events ("M") for names.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from tiered.core.events import CopyEnded, Waited
from tiered.core.ops import Op
from tiered.core.spans import Recorder, Span
from tiered.offload.lane import Lane

PROCESS = 1
COMPUTE, WAITS = 1, 2  # threads of the trace; behind them one for each way of copies
COPIES = {way: WAITS + 1 + number for number, way in enumerate(Lane)}


def chrome_trace(recorder: Recorder) -> dict[str, Any]:
    """The recording as JSON types. Compute, waits and each way of copies have a track; time 0 is the first event's."""
    starts = [span.began for span in recorder.spans] + [copy.submitted for copy in recorder.copies]
    origin = min(starts, default=0)
    steps = _Steps(recorder)
    events = [
        *_names(sorted({copy.lane for copy in recorder.copies}, key=COPIES.__getitem__)),
        *(_of_span(span, steps, origin) for span in recorder.spans if span.ended is not None),
        *(_of_wait(wait, steps, origin) for wait in recorder.waits if wait.exposed_ns),
        *(_of_copy(copy, steps, origin) for copy in recorder.copies),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Steps:
    """Which forward an event belongs to, and what that was for."""

    def __init__(self, recorder: Recorder) -> None:
        self._kinds = recorder.kinds
        self._began = [span.began for span in recorder.spans if span.op is Op.STEP]

    def at(self, moment: int) -> dict[str, Any]:
        """Of the step that was under way, or of the last before."""
        return self.of(bisect_right(self._began, moment) - 1)

    def of(self, forward: int | None) -> dict[str, Any]:
        return {} if forward is None or forward < 0 else {"forward": forward, "kind": self._kinds[forward]}


def _names(ways: Iterable[Lane]) -> Iterable[dict[str, Any]]:
    tracks = {COMPUTE: "compute", WAITS: "waits"} | {COPIES[way]: f"copy: {way}" for way in ways}
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "tiered"}}
    for thread, name in tracks.items():
        yield {"ph": "M", "pid": PROCESS, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": PROCESS, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _of_span(span: Span, steps: _Steps, origin: int) -> dict[str, Any]:
    assert span.ended is not None, "only whole ranges are shown"
    args = steps.of(span.forward)
    return _event(span.op.value, "compute", COMPUTE, span.began, span.ended, origin, span.layer, args)


def _of_wait(wait: Waited, steps: _Steps, origin: int) -> dict[str, Any]:
    args = {"late": wait.late} | steps.at(wait.began)
    return _event(f"wait for {wait.lane}", "wait", WAITS, wait.began, wait.ended, origin, wait.layer, args)


def _of_copy(copy: CopyEnded, steps: _Steps, origin: int) -> dict[str, Any]:
    queued = (copy.started - copy.submitted) / 1000
    args = {"bytes": copy.nbytes, "pieces": copy.copies, "queued_us": queued, "failed": copy.failed}
    args |= steps.at(copy.submitted)
    return _event(copy.lane.value, "copy", COPIES[copy.lane], copy.started, copy.ended, origin, copy.layer, args)


def _event(
    name: str, category: str, thread: int, began: int, ended: int, origin: int, layer: int | None, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": thread,
        "cat": category,
        "name": name if layer is None else f"{name}/L{layer}",
        "ts": (began - origin) / 1000,
        "dur": (ended - began) / 1000,
        "args": args if layer is None else {"layer": layer} | args,
    }
