"""How fast records are fetched, by their size and by how they lie.

16 MiB of records at a time from pinned memory: `scattered`, every second one of a stretch, or `merged`, runs of four
out of eight that are copied as one piece each. Each round takes another stretch, so no cache of the host serves it.
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
from tier_fuzz import round_trip
from torch import Tensor

from gpu_parts.kernel_case import normal, shuffled
from gpu_parts.moved_bytes import difference, fill_at_random, poison, speeds
from gpu_parts.setting import Setting, checked
from gpu_parts.slow_transports import transport
from tiered.clustering.cluster_index import ClusterIndex
from tiered.core.ledger import Ledger
from tiered.offload.chunk import Chunk
from tiered.offload.codec_bytes import Codec
from tiered.offload.copy_segments import Segment, merge_neighbours
from tiered.offload.pinning import pick_pinner
from tiered.offload.transport import Copy, Lane, Transport
from tiered.policies.polestar.hidden_records import HiddenRecords
from tiered.tiers.opening import open_tiers

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 9
PEAK = "copy peak"
_RUN = 4  # records that lie side by side, for `merged`
_SIZES = (4, 16, 64, 144, 256, 1024)  # KiB of a record; 144: LLaDA's of 64 rows, with its room
_BY_LAYOUT = [f"{size} KiB {layout}" for size in _SIZES for layout in ("scattered", "merged")]


def cases(setting: Setting) -> list[str]:
    """The peak, every size by how the records lie, and last what the tier manager makes of it."""
    fetched = (f"delta fetch {count} clusters" for count in ((2, 6) if setting.tiny else (4, 16, 64, 256)))
    return [PEAK, *_BY_LAYOUT, *fetched]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Speeds, and `over_peak`, their share of what one large copy from the same memory does in this process."""
    if case == PEAK:
        pinner = pick_pinner("auto", setting.on).name
        return {"pinner": pinner, "bytes": len(_source(setting)), **speeds(len(_source(setting)), _peak_times(setting))}
    if case.startswith("delta fetch"):
        return tier_fetch(setting, int(case.split()[2]), peak(setting))
    return _by_layout(setting, int(case.split()[0]) * KIB, case.split()[-1])


def peak(setting: Setting) -> float:
    """Bytes a second of one large copy to the device."""
    return len(_source(setting)) / spread(_peak_times(setting))[1]


def segments(size: int, window: int, total: int, run: int) -> list[Segment]:
    """As many records of `size` as `total` bytes hold, from the stretch number `window` of twice as many bytes: `run`
    of them side by side, then as many that are left out. In the target they stand one after another."""
    base = 2 * total * window
    return [
        Segment(base + (number // run * 2 * run + number % run) * size, number * size, size)
        for number in range(total // size)
    ]


def _stretches(setting: Setting, size: int, run: int = 1) -> tuple[list[list[Segment]], Tensor, Tensor]:
    """Records of each stretch of the source, what they are fetched to, and what has to be there of the first."""
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
    """From when the lane begins with a fetch until it has ended: what the host does in between counts."""
    event = carrier.copy(Lane.FETCH, copies)
    event.synchronize()
    started, ended = event.times.started, event.times.ended
    assert started is not None and ended is not None, "a job that has ended has its times"
    return max(ended - started, 1) / 1e9


def tier_fetch(setting: Setting, wanted: int, peak: float) -> dict[str, Any]:
    """The fetch of an update as the tier manager does it: so many records of nvfp4_delta to the device, and decoded
    there. Time from `fetch` until what waits for the ticket is done, beside that of its bytes at `peak` bytes a second.
    The answer has to be, bit for bit, what encoding and decoding on the spot gives."""
    clusters, rows, width = (8, 4, 128) if setting.tiny else (512, 64, 4096)
    hidden, index = _clustered(clusters, rows, width, torch.Generator(setting.on).manual_seed(setting.seed))
    order = torch.Generator().manual_seed(setting.seed)
    drawn = [torch.randperm(clusters, generator=order)[:wanted].tolist() for _ in range(ROUNDS)]
    out = torch.empty(wanted * rows, width, dtype=hidden.dtype, device=setting.on)
    with open_tiers(Ledger(), device=hidden.device, dtype=hidden.dtype) as tiers:
        records = HiddenRecords.store(tiers, hidden, index, layer=0)
        tiers.synchronize()
        turns = cycle(drawn)
        times = device_times(lambda: tiers.fetch(records.keys(next(turns))).wait(out), setting.on, rounds=ROUNDS)
        out.fill_(torch.nan)
        ticket = tiers.fetch(records.keys(drawn[0]))
        ticket.wait(out)
        tiers.synchronize()
        tiers.check_integrity()
    members, base = index.rows.split(index.sizes), index.centroids.to(hidden.dtype)
    given = [(hidden[members[cluster]], base[cluster]) for cluster in drawn[0]]
    encoded = torch.cat([round_trip(of_cluster, Codec.NVFP4_DELTA, centroid) for of_cluster, centroid in given])
    wrong, there = int((out != encoded).any(dim=1).sum()), torch.cat([of_cluster for of_cluster, _ in given]).double()
    error, nbytes = float((out.double() - there).norm() / there.norm()), ticket.nbytes
    row = {"record_bytes": nbytes // wanted, "layout": "tier manager", "bytes": nbytes, **speeds(nbytes, times)}
    row |= {"fetch_us": 1e-3 * nbytes / row["gb_per_s"], "floor_us": 1e6 * nbytes / peak, "peak_gb_per_s": peak / 1e9}
    row |= {"over_peak": 1e9 * row["gb_per_s"] / peak, "error": error if math.isfinite(error) else None}
    return row | checked(f"{wrong} of {len(out)} rows are not the encoded ones" if wrong else None)


def _clustered(
    clusters: int, rows: int, width: int, generator: torch.Generator
) -> tuple[Float[Tensor, "length width"], ClusterIndex]:
    """Rows about one centre for each cluster, scattered over a canvas, and the index that knows where they are."""
    columns = shuffled(generator, clusters * rows).view(clusters, rows).sort(dim=1).values
    near = normal(generator, clusters, 1, width) + 0.3 * normal(generator, clusters, rows, width)
    hidden = torch.empty(clusters * rows, width, dtype=torch.bfloat16, device=generator.device)
    hidden[columns] = near.bfloat16()
    return hidden, ClusterIndex(
        rows=columns.flatten(),
        sizes=(rows,) * clusters,
        counts=torch.full((clusters,), rows, device=generator.device),
        shares=(clusters,),
        centroids=hidden[columns].float().mean(dim=1),
        medoids=columns[:, 0].clone(),
    )


def _total(setting: Setting) -> int:
    """Bytes of one fetch; in a rehearsal one record of every size fits."""
    return MIB if setting.tiny else 16 * MIB


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
