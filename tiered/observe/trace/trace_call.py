"""A call under a recorder: what it answered, where its time went, and its trace."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from tiered.core.spans import Recorder, recording
from tiered.inputs import Inputs
from tiered.observe.trace.chrome_trace import chrome_trace
from tiered.offload.device import synchronize
from tiered.output import GenerationOutput
from tiered.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A call that was recorded.

    Attributes:
        out: what `Runtime.generate` returned.
        recorder: ranges, copies and waits.
        trace: the same in Chrome's format; of a profiled call, the profiler's own.
    """

    out: GenerationOutput
    recorder: Recorder
    trace: dict[str, Any]


def trace_call(
    runtime: Runtime, inputs: Inputs, *, profiled: bool | None = None, synchronized: bool = False, **options: Any
) -> TracedCall:
    """`runtime.generate(inputs, **options)` under a recorder.

    Args:
        profiled: whether torch's profiler makes the trace, whose ranges then have our names; None: on CUDA, where the
            host only launches what the device does later.
        synchronized: on CUDA, wait for the device at both ends of every range. Times of operations are the device's
            then, and no copy overlaps with compute.

    Raises:
        TierCapacityError, TypeError, ValueError: as `Runtime.generate`.
    """
    cuda = runtime.device.type == "cuda"
    profiled = cuda if profiled is None else profiled
    recorder = Recorder(
        synchronize=partial(synchronize, runtime.device) if synchronized and cuda else None,
        mark=record_function if profiled else None,
    )
    with ExitStack() as stack:
        profiler = None
        if profiled:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
            profiler = stack.enter_context(profile(activities=activities))
        stack.enter_context(recording(recorder))
        out = runtime.generate(inputs, **options)
    return TracedCall(
        out=out, recorder=recorder, trace=chrome_trace(recorder) if profiler is None else _exported(profiler)
    )


def _exported(profiler: profile) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())
