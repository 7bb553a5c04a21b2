"""Measures both routes over the bus on a CUDA device."""

import statistics
from collections.abc import Callable
from functools import partial

import torch

from tiered.offload.device_timer import device_times
from tiered.offload.gather import gather_of
from tiered.offload.routes import Route, measure_crossover
from tiered.offload.transport import Copy

SIZES = tuple(1 << power for power in range(10, 18))  # 1 KiB to 128 KiB
RECORDS = 64  # at a time, scattered over twice their bytes
REPEATS = 7
_crossovers: dict[str, int] = {}  # by device name


def crossover_for(device: torch.device) -> int:
    """The record size in bytes from which the copy engine is at least as fast as a gather of a few programs; 0 on a
    CPU, where there is only one route. Measured once for each kind of device, with 16 MiB of pinned memory that torch
    keeps for later use."""
    if device.type == "cpu":
        return 0
    name = torch.cuda.get_device_name(device)
    if name not in _crossovers:
        _crossovers[name] = measure_crossover(timer_for(device), SIZES)
    return _crossovers[name]


def timer_for(device: torch.device) -> Callable[[Route, int], float]:
    """Times `RECORDS` records of a size from pinned memory to the CUDA `device`: the median, in seconds."""
    with torch.cuda.device(device):  # memory is pinned for the current device
        source = torch.zeros(2 * RECORDS * SIZES[-1], dtype=torch.uint8, pin_memory=True)
    destination = torch.zeros(RECORDS * SIZES[-1], dtype=torch.uint8, device=device)

    def time_of(route: Route, size: int) -> float:
        pieces = [
            Copy(source[2 * record * size :][:size], destination[record * size :][:size]) for record in range(RECORDS)
        ]
        gather = gather_of(pieces)
        assert gather is not None, "records of whole KiB in one buffer"

        def by_engine() -> None:
            for piece in pieces:
                piece.destination.copy_(piece.source, non_blocking=True)

        work = by_engine if route is Route.ENGINE else partial(gather.launch, device)
        return statistics.median(device_times(work, device, rounds=REPEATS))  # the warm-up compiles the kernel

    return time_of
