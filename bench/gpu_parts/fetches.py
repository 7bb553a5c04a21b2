"""Part of a GPU day: how fast scattered records are fetched, by their size and the route that they take.

16 MiB of records at a time, every second one of a stretch of pinned memory, or, for `merged`, runs of four out of eight
that are copied as one piece each; another stretch each round, so that no cache of the host serves them again.
"""

import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from gpu_parts import tier_fetches
from gpu_parts.moved_bytes import checked, difference, fill_at_random, poison, speeds
from gpu_parts.setting import Setting
from tiered.kernels.choice import for_device
from tiered.kernels.gather_copy_ref import gather_copy
from tiered.offload import routes
from tiered.offload.chunk import Chunk
from tiered.offload.cuda_transport import CudaTransport
from tiered.offload.device_timer import device_times
from tiered.offload.pinning import pick_pinner
from tiered.offload.routes import Route, Segment, measure_crossover, neighbours_merged
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Copy, Lane, Transport

KIB, MIB = 1 << 10, 1 << 20
RECORD_KIB = (4, 16, 64, 144, 256, 1024)  # 144: LLaDA's record of 64 rows, with its room
ROUTES = ("engine", "gather", "chosen", "merged")
PROGRAMS = (1, 2, 4, 8, 16)
PROGRAMS_KIB = (16, 144)
RUN = 4  # records that lie side by side, for `merged`
ROUNDS = 9
PEAK, CROSSOVER = "copy peak", "crossover"

_RECORDS = {f"{size} KiB {route}": (size * KIB, route) for size in RECORD_KIB for route in ROUTES}
_PROGRAMS = {f"{size} KiB by programs": size * KIB for size in PROGRAMS_KIB}


def cases(setting: Setting) -> list[str]:
    """The peak, where the routes cross, every size by every route, gathers of more or fewer programs, and last what
    the tier manager makes of it."""
    return [PEAK, CROSSOVER, *_RECORDS, *_PROGRAMS, *tier_fetches.cases(setting)]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Speeds, and `over_peak`, their share of what one large copy from the same memory does in this process."""
    if case == PEAK:
        pinner = pick_pinner("auto", setting.on).name
        return {"pinner": pinner, "bytes": len(_source(setting)), **speeds(len(_source(setting)), _peak_times(setting))}
    if case == CROSSOVER:
        return _crossover(setting)
    if case in _PROGRAMS:
        return _by_programs(setting, _PROGRAMS[case])
    if case in _RECORDS:
        return _records(setting, *_RECORDS[case])
    return tier_fetches.measure(setting, case, peak=peak(setting))


def peak(setting: Setting) -> float:
    """Bytes a second of one large copy to the device."""
    return len(_source(setting)) / statistics.median(_peak_times(setting))


def segments(size: int, window: int, total: int, run: int) -> list[Segment]:
    """As many records of `size` as `total` bytes hold, from the stretch number `window` of twice as many bytes: `run`
    of them side by side, then as many that are left out. In the target they stand one after another."""
    base = 2 * total * window
    return [
        Segment(base + (number // run * 2 * run + number % run) * size, number * size, size)
        for number in range(total // size)
    ]


def _records(setting: Setting, size: int, route: str) -> dict[str, Any]:
    source, total = _source(setting), _total(setting)
    nbytes = total // size * size
    target = torch.empty(nbytes, dtype=torch.uint8, device=setting.on)
    run = min(RUN, total // size) if route == "merged" else 1
    windows = []
    for window in range(len(source) // (2 * total)):
        records = segments(size, window, total, run)
        windows.append(neighbours_merged(records) if route == "merged" else records)
    stretches = [_copies(source, target, window) for window in windows]
    crossover = {"engine": 0, "gather": sys.maxsize}.get(route, _measured_crossover(setting))
    with closing(_transport(setting, crossover)) as transport:
        _seconds(transport, stretches[0])  # compiles
        times = [_seconds(transport, stretch) for stretch, _ in zip(cycle(stretches), range(ROUNDS), strict=False)]
        poison(target)
        _seconds(transport, stretches[-1])
    wanted = torch.cat([source[segment.source :][: segment.size] for segment in windows[-1]])
    return {
        "record_bytes": size,
        "route": route,
        "copies": len(windows[-1]),
        **_beside_peak(setting, speeds(nbytes, times)),
        **checked(difference(target, wanted)),
    }


def _seconds(transport: Transport, copies: Sequence[Copy]) -> float:
    """From when the lane begins with a fetch until it has ended: what the host does in between counts."""
    event = transport.copy(Lane.FETCH, copies)
    event.synchronize()
    started, ended = event.times.started, event.times.ended
    assert started is not None and ended is not None, "a job that has ended has its times"
    return max(ended - started, 1) / 1e9


def _by_programs(setting: Setting, size: int) -> dict[str, Any]:
    """The kernel alone: where each record lies is on the device before the time counts."""
    source, total = _source(setting), _total(setting)
    nbytes = total // size * size
    target = torch.empty(nbytes, dtype=torch.uint8, device=setting.on)
    tables = [
        torch.tensor(list(zip(*segments(size, window, total, 1), strict=True)), dtype=torch.int64, device=setting.on)
        for window in range(len(source) // (2 * total))
    ]
    copy, turns = for_device(gather_copy, setting.on), cycle(tables)
    wanted = torch.cat([source[start : start + size] for start in tables[0][0].tolist()])
    found: dict[str, float] = {}
    why = None

    def fetch(table: Int64[Tensor, "3 records"], programs: int) -> None:
        starts, places, sizes = table
        copy(source, starts, target, places, sizes, programs=programs)

    for programs in PROGRAMS:
        times = device_times(lambda: fetch(next(turns), programs), setting.on, rounds=ROUNDS, hold=True)  # noqa: B023
        found[str(programs)] = speeds(nbytes, times)["gb_per_s"]
        poison(target)
        fetch(tables[0], programs)
        why = why or difference(target, wanted)
    return {
        "record_bytes": size,
        "gb_per_s_by_programs": found,
        "over_peak_by_programs": {programs: 1e9 * speed / peak(setting) for programs, speed in found.items()},
        "programs_in_use": routes.PROGRAMS,
        **checked(why),
    }


def _crossover(setting: Setting) -> dict[str, Any]:
    """What the runtime would measure, and what it rests on, by record size. None: the gather is always faster."""
    taken = _measured_crossover(setting)
    row: dict[str, Any] = {"crossover_bytes": taken if taken < sys.maxsize else None}
    if setting.on.type != "cuda":
        return row
    time_of = routes.timer_for(setting.on)
    times = {(route, size): time_of(route, size) for size in routes.SIZES for route in Route}
    again = measure_crossover(lambda route, size: times[route, size], routes.SIZES)
    return row | {
        "crossover_again_bytes": again if again < sys.maxsize else None,
        "records": routes.RECORDS,
        **{f"{route.value}_us": {str(size): 1e6 * times[route, size] for size in routes.SIZES} for route in Route},
    }


def _beside_peak(setting: Setting, figures: dict[str, float]) -> dict[str, float]:
    return figures | {
        "peak_gb_per_s": peak(setting) / 1e9,
        "over_peak": 1e9 * figures["gb_per_s"] / peak(setting),
    }


def _copies(source: Tensor, target: Tensor, records: Sequence[Segment]) -> list[Copy]:
    return [
        Copy(source[segment.source :][: segment.size], target[segment.destination :][: segment.size])
        for segment in records
    ]


def _transport(setting: Setting, crossover: int) -> Transport:
    return CudaTransport(setting.on, crossover=crossover) if setting.on.type == "cuda" else ThreadTransport()


def _total(setting: Setting) -> int:
    """Bytes of one fetch; in a rehearsal one record of every size fits."""
    return MIB if setting.tiny else 16 * MIB


@cache
def _measured_crossover(setting: Setting) -> int:
    return routes.crossover_for(setting.on)


@cache
def _memory(setting: Setting) -> Chunk:
    chunk = pick_pinner("auto", setting.on).allocate(16 * _total(setting))
    fill_at_random(chunk.bytes, setting.seed)
    return chunk


def _source(setting: Setting) -> UInt8[Tensor, " bytes"]:
    return _memory(setting).bytes


@cache
def _peak_times(setting: Setting) -> tuple[float, ...]:
    source = _source(setting)
    target = torch.empty(len(source), dtype=torch.uint8, device=setting.on)
    copy = partial(target.copy_, source, non_blocking=True)
    return tuple(device_times(copy, setting.on, rounds=ROUNDS, hold=True))
