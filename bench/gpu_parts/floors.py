"""Times of kernels, and of torch's operations in a step, beside the time that their bytes take to move."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measuring.device_timer import device_times
from measuring.statistics import spread
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, generator_of, interpret, sized
from gpu_parts.moved_bytes import copy_bandwidth
from gpu_parts.setting import Setting

Work = Callable[[], object]
Inputs = list[tuple[Any, tuple[Tensor, ...]]]  # inputs of a case, each with room for its results

_ROUNDS = 11  # rounds of each of two interleaved timings
_CALLS = 16  # least calls of a round: events are exact to half a microsecond
_L2_TIMES = 4  # bytes of the inputs of a round, in caches
_MOST_INPUTS = 256  # enough for a norm of 32 rows and an L2 of 50 MB


def cases(setting: Setting) -> list[str]:
    """All cases, by kernel."""
    return list(sized("TIMED", setting.tiny))


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Times of one call: the median `time_us`, and `low_us` and `high_us`, its 20th and 80th percentiles. `timed` says
    how. `eager_us` is the time if the host launches call after call. `noise` is the difference between two interleaved
    medians of the same, over `time_us`. `floor_us` is `bytes` at the measured bandwidth of a copy.
    """
    device = setting.on
    interpret(device)
    of = sized("TIMED", setting.tiny)[case]
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    inputs = rotation(of, generator_of(case, setting.seed, device), cache)
    nbytes, flops, compiled = of.moved(inputs[0][0]), of.arithmetic(inputs[0][0]), list[dict[str, Any]]()

    def work() -> None:
        for given, room in inputs:
            of.run(given, room)

    with recorded(compiled):
        work()
    rounds, calls = (_ROUNDS, -(-_CALLS // len(inputs))) if device.type == "cuda" else (1, 1)
    eager = device_times(work, device, rounds=rounds, warm_up=0)
    replayed, how = _replayed(work, calls, device)
    times = device_times(replayed, device, rounds=2 * rounds, warm_up=device.type == "cuda", hold=True)
    low, time_us, high = (1e6 * seconds / calls / len(inputs) for seconds in spread(times))
    floor_us = nbytes / copy_bandwidth(device, setting.tiny) * 1e6
    figures = {"time_us": time_us, "low_us": low, "high_us": high, "gb_per_s": nbytes / time_us / 1e3}
    figures["noise"] = abs(spread(times[::2])[1] - spread(times[1::2])[1]) / spread(times)[1]
    figures |= {"floor_us": floor_us, "over_floor": time_us / floor_us}
    figures["eager_us"] = 1e6 * spread(eager)[1] / len(inputs)
    if flops:
        figures["tflop_per_s"] = flops / time_us / 1e6
    row = {"kernel": of.kernel, "bytes": nbytes, "timed": how, "inputs": len(inputs), "compiled": compiled}
    return row | {name: float(f"{value:.4g}") for name, value in figures.items()}


def rotation(case: KernelCase, generator: torch.Generator, cache: int) -> Inputs:
    """Independent inputs, up to `_MOST_INPUTS`, so that each has left a cache of `cache` bytes by its next turn."""

    def drawn() -> tuple[Any, tuple[Tensor, ...]]:
        given = case.draw(generator)
        return given, case.room(given)

    first = drawn()
    count = min(_MOST_INPUTS, math.ceil(_L2_TIMES * cache / case.moved(first[0])))
    return [first, *(drawn() for _ in range(count - 1))]


def _replayed(work: Work, calls: int, device: torch.device) -> tuple[Work, str]:
    """`calls` of `work` as one graph: without the host, the time of a small kernel is its own. If the device cannot
    capture them, the host launches them."""
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


@contextmanager
def recorded(kernels: list[dict[str, Any]]) -> Iterator[None]:
    """Add a row to `kernels` for every compiled kernel that Triton starts in the context. It has the name, a thread's
    registers and spilled ones, bytes of shared memory, and warps. Interpreted kernels have no row."""
    from triton.runtime.jit import JITFunction

    started: dict[int, Any] = {}  # by identity
    run = JITFunction.run

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        started[id(kernel)] = kernel
        return kernel

    JITFunction.run = watched
    try:
        yield
    finally:
        JITFunction.run = run
        for made in filter(None, started.values()):
            row = {"name": made.metadata.name, "registers": made.n_regs, "spills": made.n_spills}
            kernels.append(row | {"shared_bytes": made.metadata.shared, "warps": made.metadata.num_warps})
