"""Kernels, copies, waits and idle time of a step, from torch's profiler; and a trace.

A call has one block at 4096 positions over eight layers of LLaDA-8B's shape, with random weights. Layers are alike, and
a trace of all 32 takes too long to write. The profiler costs the host time at every launch. So the device's time is
that of the profiled call, and the wall clock is that of a call without the profiler.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from host_waits import HostWait, host_waits
from torch import Tensor

from gpu_parts.policy_calls import BLOCK, one_after_another
from gpu_parts.profile_counts import ProfiledCall, write_small_trace
from gpu_parts.random_llada import few_layers, random_ids
from gpu_parts.setting import Setting, checked
from tiered.core.ops import Op
from tiered.core.spans import Recorder, active, recording
from tiered.observe.trace import trace_call
from tiered.policies.base import Policy
from tiered.policies.polestar.policy import Polestar
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

LAYERS = 8
# Four tokens a step, and an update behind more than seven: every other step updates.
POLESTAR = Polestar(codec="nvfp4_delta", update_threshold=7)
OPTIONS = one_after_another(BLOCK, 8)
_LINES = 40
_OUTSIDE = "outside"


def cases(setting: Setting) -> list[str]:
    """The case without the profiler comes first: it takes least time."""
    return ["host waits", "plain and update steps", "block steps"]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Figures by kind of forward; one case writes its trace."""
    if case == "host waits":
        runtime, ids, _ = _warm(setting, POLESTAR)
        with recording(Recorder()) as recorder, host_waits(_at) as found:
            runtime.generate(ids, **OPTIONS)
        return wait_figures(found, recorder.kinds)
    if case == "block steps":
        return _profiled(setting, make_policy("fast_dllm_dual"), None)
    return _profiled(setting, POLESTAR, setting.stem)


@cache
def _warm(setting: Setting, policy: Policy) -> tuple[Runtime, Tensor, Sequence[float]]:
    """A runtime with compiled kernels, a prompt, and the seconds of each forward of a call without the profiler."""
    runtime = Runtime(few_layers(setting, LAYERS), policy=policy)
    ids = random_ids(setting, (256 if setting.tiny else 4096) - BLOCK)
    runtime.generate(ids, **OPTIONS)
    return runtime, ids, runtime.generate(ids, **OPTIONS).timings.steps


def _profiled(setting: Setting, policy: Policy, stem: str | None) -> dict[str, Any]:
    runtime, ids, seconds = _warm(setting, policy)
    traced = trace_call(runtime, ids, **OPTIONS)
    call = ProfiledCall(traced.trace, traced.kinds)
    steps = call.by_kind()
    for kind, figures in steps.items():
        wall = 1000 * median(each for each, of in zip(seconds, call.kinds, strict=True) if of == kind)
        # Time that the host adds to the device's own: a graph of the step would save most of it.
        idle = wall - figures["busy_ms"]
        figures |= {"unwatched_ms": round(wall, 4), "idle_ms": round(idle, 4), "idle_share": round(idle / wall, 4)}
    row: dict[str, Any] = {"layers": runtime.model.shape.layers, "positions": ids.shape[1] + BLOCK, "steps": steps}
    row |= {"fetches": call.fetches(), "top_kernels": call.top_kernels(), "unclaimed": call.unclaimed}
    if stem is not None:
        row["trace"] = write_small_trace(Path(f"{stem}.trace.json.gz"), traced.trace)
    blind = setting.on.type == "cuda" and not any(event.category == "kernel" for event in call.device)
    return row | (checked("the profiler saw no kernel") if blind else {})


def wait_figures(found: Counter[HostWait], kinds: Sequence[str]) -> dict[str, Any]:
    """The row of the waits that `_at` has named. `kinds`: kinds of the forwards."""
    steps = Counter(kinds)
    places = {kind: Counter[str]() for kind in steps}
    lines: dict[tuple[str, str, str, str, str], int] = defaultdict(int)
    for wait, count in found.items():
        number, place, op = wait.at.split()
        kind = kinds[int(number)] if place != _OUTSIDE else _OUTSIDE
        if place != _OUTSIDE:
            places[kind][place] += count
        lines[kind, place, op, wait.line, wait.what] += count
    by_kind = {}
    for kind, of in places.items():
        sums = {"waits": of.total(), "waits_in_forward": of["forward"] + of["layer"], "waits_in_layers": of["layer"]}
        by_kind[kind] = {"steps": steps[kind]} | {name: round(count / steps[kind], 2) for name, count in sums.items()}
    named = ("kind", "place", "op", "line", "what")
    most = sorted(lines.items(), key=lambda item: -item[1])[:_LINES]
    told = [dict(zip(named, line, strict=True)) | {"count": count} for line, count in most]
    return {"waits_by_kind": by_kind, "lines": told, "lines_left_out": len(lines) - len(told)}


def _at() -> str:
    """The number of the step under way, the innermost of "layer", "forward" and "step", and the innermost range."""
    recorder = active()
    span = None if recorder is None else recorder.innermost
    if span is None or span.forward is None:
        return f"-1 {_OUTSIDE} -"
    place, holder = "layer" if span.layer is not None else "step", span
    while place == "step" and holder is not None:
        place = "forward" if holder.op is Op.FORWARD else "step"
        holder = holder.parent
    return f"{span.forward} {place} {span.op.value}"
