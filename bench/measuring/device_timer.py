"""Times work by the device's own clock if it has one, and makes a device stand still for a while."""

import time
from collections.abc import Callable

import torch

from tiered.offload.cuda_event import mark, ns_between

HOLD_SECONDS = 1e-4  # long enough for the host to hand over some dozens of kernels
_CYCLES_A_SECOND = 1.7e9  # the clock of a GPU's processors, about


def device_times(
    work: Callable[[], object], device: torch.device, *, rounds: int, warm_up: int = 1, hold: bool = False
) -> list[float]:
    """The seconds that each of `rounds` calls of `work` takes, after `warm_up` calls that do not count.

    On CUDA, the time is between two events on the current stream of `device`, in front of the work and behind it. Work
    on other streams counts as far as the current one waits for it. The device is idle when a round begins, so the
    launch of the first kernel is part of the time, unless `hold`. On a CPU, the time is by the host's clock.

    Args:
        hold: let the device wait while the host launches kernels, to time kernels alone. No effect on a CPU.

    Raises:
        ValueError: no rounds, or a negative number of calls to warm up.
    """
    if rounds < 1 or warm_up < 0:
        raise ValueError(f"rounds = {rounds} must be 1 or more, warm_up = {warm_up} 0 or more")
    for _ in range(warm_up):
        work()
    time_of = _cuda_seconds if device.type == "cuda" else _host_seconds
    return [time_of(work, device, hold) for _ in range(rounds)]


def stand_still(device: torch.device, seconds: float) -> None:
    """Let the current stream of `device` do nothing for about `seconds`; the host goes on. On a CPU, the caller
    sleeps."""
    if device.type != "cuda":
        time.sleep(seconds)
        return
    with torch.cuda.device(device):
        torch.cuda._sleep(round(seconds * _CYCLES_A_SECOND))


def _cuda_seconds(work: Callable[[], object], device: torch.device, hold: bool) -> float:
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    if hold:
        stand_still(device, HOLD_SECONDS)
    start = mark(stream)
    work()
    end = mark(stream)
    end.synchronize()
    return ns_between(start, end) / 1e9


def _host_seconds(work: Callable[[], object], device: torch.device, hold: bool) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
