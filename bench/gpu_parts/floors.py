"""Kernels, and what of torch a step spends its time with, against the time that moving their bytes takes."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gpu_parts.bandwidth import copy_bandwidth
from gpu_parts.compiled_kernels import recorded
from gpu_parts.kernel_case import KernelCase, interpret
from gpu_parts.kernel_cases import TIMED, generator_of, sized
from gpu_parts.setting import Setting
from tiered.offload.device_timer import device_times

Work = Callable[[], object]
Inputs = list[tuple[Any, tuple[Tensor, ...]]]  # of a case, each with room for its results

_ROUNDS = 11  # of each of two interleaved timings
_CALLS = 16  # in a round at least: events are good to half a microsecond
_L2_TIMES = 4  # what the inputs of a round weigh, in caches
_MOST_INPUTS = 16


def cases(setting: Setting) -> list[str]:
    """All, by kernel."""
    return list(sized(TIMED, setting.tiny))


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Times of one call: `time_us`, median, and `low_us` and `high_us`, its 20th and 80th percentiles, as `timed` says;
    `eager_us` where the host launches call after call. `noise` is the difference between two interleaved medians of the
    same, over `time_us`. `floor_us` is `bytes` at the measured bandwidth of a copy.
    """
    device = setting.on
    interpret(device)
    timed = sized(TIMED, setting.tiny)[case]
    generator = generator_of(case, setting.seed, device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    inputs = rotation(timed, generator, cache)
    nbytes, work = timed.moved(inputs[0][0]), lambda: _run(timed, inputs)
    compiled: list[dict[str, Any]] = []
    with recorded(compiled):
        work()
    rounds, calls = (_ROUNDS, -(-_CALLS // len(inputs))) if device.type == "cuda" else (1, 1)
    eager = device_times(work, device, rounds=rounds, warm_up=0)
    replayed, how = _replayed(work, calls, device)
    times = device_times(replayed, device, rounds=2 * rounds, warm_up=device.type == "cuda", hold=True)
    calls *= len(inputs)
    return _figures(
        timed.kernel,
        [seconds / calls * 1e6 for seconds in times],
        nbytes=nbytes,
        flops=timed.arithmetic(inputs[0][0]),
        floor_us=nbytes / copy_bandwidth(device, setting.tiny) * 1e6,
    ) | {
        "eager_us": _short(median(eager) / len(inputs) * 1e6),
        "timed": how,
        "inputs": len(inputs),
        "compiled": compiled,
    }


def rotation(case: KernelCase[Any], generator: torch.Generator, cache: int) -> Inputs:
    """As many independent inputs as it takes for each to have left a cache of so many bytes before its next turn."""
    inputs = [_drawn(case, generator)]
    count = min(_MOST_INPUTS, math.ceil(_L2_TIMES * cache / case.moved(inputs[0][0])))
    return inputs + [_drawn(case, generator) for _ in range(count - 1)]


def _drawn(case: KernelCase[Any], generator: torch.Generator) -> tuple[Any, tuple[Tensor, ...]]:
    given = case.draw(generator)
    return given, case.room(given)


def _run(case: KernelCase[Any], inputs: Inputs) -> None:
    for given, room in inputs:
        case.run(given, room)


def _replayed(work: Work, calls: int, device: torch.device) -> tuple[Work, str]:
    """`work`, so many times, as one graph: with the host out of the way, the time of a small kernel is its own. Where
    the device can capture none, as the host launches them."""
    if device.type != "cuda":
        return work, "launched"
    graph = torch.cuda.CUDAGraph()
    # A capture that fails leaves its own stream current: the outer context does not.
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    work()
        except RuntimeError as error:
            why = str(error).strip().splitlines()[:1]
            return lambda: [work() for _ in range(calls)], f"launched: {type(error).__name__}: {''.join(why)}"
    return graph.replay, "graph"


def _figures(
    kernel: str, times_us: Sequence[float], *, nbytes: int, flops: int, floor_us: float
) -> dict[str, float | str]:
    ordered, time_us = sorted(times_us), median(times_us)
    last = len(ordered) - 1
    row: dict[str, float | str] = {
        "kernel": kernel,
        "time_us": _short(time_us),
        "low_us": _short(ordered[round(0.2 * last)]),
        "high_us": _short(ordered[round(0.8 * last)]),
        "noise": _short(abs(median(times_us[::2]) - median(times_us[1::2])) / time_us),
        "bytes": nbytes,
        "gb_per_s": _short(nbytes / time_us / 1e3),
        "floor_us": _short(floor_us),
        "over_floor": _short(time_us / floor_us),
    }
    return row | ({"tflop_per_s": _short(flops / time_us / 1e6)} if flops else {})


def _short(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")
