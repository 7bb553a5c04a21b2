"""Speeds of fetches of records, by their size and layout.

A fetch takes 16 MiB of records from pinned memory. It is `scattered`, with every second one of a stretch, or `merged`,
with runs of four out of eight as pieces. Each round takes another stretch, so no cache of the host serves it.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
from jaxtyping import Float, UInt8
from measuring.device_timer import device_times
from measuring.statistics import spread
from round_trip import round_trip
from stored_clusters import clusters_of, host_bytes
from torch import Tensor

from gpu_parts.kernel_case import normal
from gpu_parts.moved_bytes import difference, fill_at_random, poison, speeds
from gpu_parts.setting import Setting, checked
from gpu_parts.slow_transports import transport
from tiered.core.ledger import Ledger
from tiered.offload.chunk import Chunk
from tiered.offload.codec_bytes import Codec
from tiered.offload.copy_segments import Segment, merge_neighbours
from tiered.offload.pinning import pick_pinner
from tiered.offload.transport import Copy, Lane, Transport
from tiered.policies.polestar.hidden_bytes import MOST_SLOTS, RECORD_ROWS
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 9
PEAK = "copy peak"
_RUN = 4  # records that lie side by side, for `merged`
_SIZES = (4, 16, 64, 144, 256, 1024)  # KiB of a record; 144 is LLaDA's of 64 rows, with its room
_BY_LAYOUT = [f"{size} KiB {layout}" for size in _SIZES for layout in ("scattered", "merged")]


def cases(setting: Setting) -> list[str]:
    """The peak, every size by layout, and last the fetches of `StoredRows`."""
    fetched = (f"delta fetch {count} clusters" for count in ((2, 6) if setting.tiny else (4, 16, 64, 256)))
    return [PEAK, *_BY_LAYOUT, *fetched]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Speeds, and `over_peak`, their share of the speed of one large copy from the same memory in this process."""
    if case == PEAK:
        pinner = pick_pinner(setting.on).name
        return {"pinner": pinner, "bytes": len(_source(setting)), **speeds(len(_source(setting)), _peak_times(setting))}
    if case.startswith("delta fetch"):
        return tier_fetch(setting, int(case.split()[2]), peak(setting))
    return _by_layout(setting, int(case.split()[0]) * KIB, case.split()[-1])


def peak(setting: Setting) -> float:
    """Bytes a second of one large copy to the device."""
    return len(_source(setting)) / spread(_peak_times(setting))[1]


def segments(size: int, window: int, total: int, run: int) -> list[Segment]:
    """As many records of `size` as `total` bytes hold, from the stretch number `window` of twice as many bytes. `run`
    records lie side by side, then as many are left out. In the target they stand one after another."""
    base = 2 * total * window
    return [
        Segment(base + (number // run * 2 * run + number % run) * size, number * size, size)
        for number in range(total // size)
    ]


def _stretches(setting: Setting, size: int, run: int = 1) -> tuple[list[list[Segment]], Tensor, Tensor]:
    """Records of each stretch of the source, the target of a fetch, and the bytes that the first one has to bring."""
    source, total = _source(setting), _total(setting)
    windows = [segments(size, window, total, run) for window in range(len(source) // (2 * total))]
    wanted = torch.cat([source[record.source :][: record.size] for record in windows[0]])
    return windows, torch.empty(total // size * size, dtype=torch.uint8, device=setting.on), wanted


def _by_layout(setting: Setting, size: int, layout: str) -> dict[str, Any]:
    source, run = _source(setting), min(_RUN, _total(setting) // size) if layout == "merged" else 1
    windows, target, wanted = _stretches(setting, size, run)
    stretches = []
    for records in windows:
        pieces = merge_neighbours(records) if layout == "merged" else records
        stretches.append([Copy(source[at:][:nbytes], target[place:][:nbytes]) for at, place, nbytes in pieces])
    with closing(transport(setting.on)) as carrier:
        _seconds(carrier, stretches[0])
        times = [_seconds(carrier, stretches[number % len(stretches)]) for number in range(ROUNDS)]
        poison(target)
        _seconds(carrier, stretches[0])
    row = {"record_bytes": size, "layout": layout, "copies": len(stretches[0]), **speeds(len(target), times)}
    row |= {"peak_gb_per_s": peak(setting) / 1e9, "over_peak": 1e9 * row["gb_per_s"] / peak(setting)}
    return row | checked(difference(target, wanted))


def _seconds(carrier: Transport, copies: Sequence[Copy]) -> float:
    """Seconds of a fetch on its lane, from its begin to its end, the host's work in between included."""
    event = carrier.copy(Lane.FETCH, copies)
    event.synchronize()
    started, ended = event.times.started, event.times.ended
    assert started is not None and ended is not None, "a job that has ended has its times"
    return max(ended - started, 1) / 1e9


def tier_fetch(setting: Setting, wanted: int, peak: float) -> dict[str, Any]:
    """The fetch of an update: `wanted` clusters of nvfp4_delta to the device, decoded there. The time from `read` until
    its rows are there stands beside that of its bytes at `peak` bytes a second. The rows have to be, bit for bit, those
    of encoding and decoding on the spot."""
    count, size, width = (8, 4, 128) if setting.tiny else (512, 64, 4096)
    record_rows, slots = (2 * size, 1) if setting.tiny else (RECORD_ROWS, MOST_SLOTS)
    given, centroids = _clustered(count, size, width, torch.Generator(setting.on).manual_seed(setting.seed))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(setting.seed)).tolist()
    numbers = cycle(order)
    drawn = [[next(numbers) for _ in range(wanted)] for _ in range(ROUNDS + 2)]
    places = [slice(size * place, size * (place + 1)) for place in range(wanted)]
    out = torch.empty(wanted * size, width, dtype=given.dtype, device=setting.on)
    with Tiers(Ledger(), device=given.device) as tiers:
        needed = host_bytes(given, count, Codec.NVFP4_DELTA, layers=2, record_rows=record_rows, slots=slots)
        stored, clusters = StoredRows(tiers, needed, 1), clusters_of([size] * count)
        for layer in (0, 1):
            stored.store(layer, clusters, given, centroids)
        tiers.synchronize()
        # Another layer each time, and a cluster only after all others: none of its rows is still in a slot.
        turns = zip(cycle((0, 1)), drawn, strict=False)

        def read() -> None:
            layer, chosen = next(turns)
            stored.read(layer, [clusters[number] for number in chosen], out, places)

        times = device_times(read, setting.on, rounds=ROUNDS)
        out.fill_(torch.nan)
        read()
        tiers.synchronize()
        stored.check_integrity()
        tiers.check_integrity()
    own, base = given.split(size), centroids.to(given.dtype)
    encoded = torch.cat([round_trip(own[number], Codec.NVFP4_DELTA, base[number]) for number in drawn[-1]])
    there = torch.cat([own[number] for number in drawn[-1]]).double()
    wrong, error = int((out != encoded).any(dim=1).sum()), float((out.double() - there).norm() / there.norm())
    nbytes = stored.fetched_bytes // len(drawn)
    row = {"record_bytes": nbytes // wanted, "layout": "stored rows", "bytes": nbytes, **speeds(nbytes, times)}
    row |= {"fetch_us": 1e-3 * nbytes / row["gb_per_s"], "floor_us": 1e6 * nbytes / peak, "peak_gb_per_s": peak / 1e9}
    row |= {"over_peak": 1e9 * row["gb_per_s"] / peak, "error": error if math.isfinite(error) else None}
    return row | checked(f"{wrong} of {len(out)} rows are not the encoded ones" if wrong else None)


def _clustered(
    clusters: int, size: int, width: int, generator: torch.Generator
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, "clusters width"]]:
    """Rows about one centre for each cluster, cluster after cluster, and their means."""
    near = normal(generator, clusters, 1, width) + 0.3 * normal(generator, clusters, size, width)
    rows = near.bfloat16()
    return rows.flatten(0, 1), rows.float().mean(dim=1)


def _total(setting: Setting) -> int:
    """Bytes of one fetch; in a rehearsal one record of every size fits."""
    return MIB if setting.tiny else 16 * MIB


@cache
def _memory(setting: Setting) -> Chunk:
    chunk = pick_pinner(setting.on).allocate(16 * _total(setting))
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
