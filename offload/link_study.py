"""What a CUDA device's link and decode kernel do, against their limits."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.codec_bytes import Codec, codec_bytes
from tiered.offload.codecs import CODECS
from tiered.offload.cuda_event import mark, ns_between
from tiered.offload.cuda_transport import CudaTransport
from tiered.offload.pinning import pick_pinner
from tiered.offload.route_timer import crossover_for
from tiered.offload.transport import Copy, Lane

KIB, MIB = 1 << 10, 1 << 20
PEAK_BYTES = 256 * MIB  # one copy of this size is as fast as the link gets
RECORD_BYTES = tuple(size * KIB for size in (4, 16, 64, 144, 256, 1024))
DECODE_ROWS, DECODE_WIDTH, ROWS_PER_RECORD = 16384, 4096, 64


def study_link(device: torch.device, rounds: int = 7) -> dict[str, object]:
    """Fetch speed by record size against one large copy, time to pin, and the decode kernel against its bytes.

    `fetch_gb_per_s` fetches 16 MiB of scattered records by `CudaTransport`, which picks the route. Speeds are 10⁹ bytes
    a second, times are medians.
    """
    began = time.perf_counter()
    chunk = pick_pinner("auto", device).allocate(PEAK_BYTES)
    pin_seconds = time.perf_counter() - began
    target = torch.empty(PEAK_BYTES, dtype=torch.uint8, device=device)
    crossover = crossover_for(device)
    transport = CudaTransport(device, crossover=crossover)
    try:
        peak = _fetch_speed(transport, [Copy(chunk.bytes, target)], rounds)
        scattered = {
            size: _fetch_speed(transport, _records(chunk.bytes, target, size), rounds) for size in RECORD_BYTES
        }
    finally:
        transport.close()
        chunk.free()
    return {
        "device": torch.cuda.get_device_name(device),
        "pinner": pick_pinner("auto", device).name,
        "pin_seconds_per_gib": pin_seconds * (1 << 30) / PEAK_BYTES,
        "copy_peak_gb_per_s": peak,
        "crossover_bytes": crossover,
        "fetch_gb_per_s": scattered,
        "fetch_over_peak": {size: speed / peak for size, speed in scattered.items()},
        **_decode_speed(device, rounds),
    }


def _records(source: UInt8[Tensor, " bytes"], target: UInt8[Tensor, " bytes"], size: int) -> list[Copy]:
    """16 MiB of records of `size` bytes, every second one of the source: no two are neighbours."""
    count = 16 * MIB // size
    return [Copy(source[2 * n * size : (2 * n + 1) * size], target[n * size : (n + 1) * size]) for n in range(count)]


def _fetch_speed(transport: CudaTransport, copies: Sequence[Copy], rounds: int) -> float:
    times = []
    for _ in range(1 + rounds):
        event = transport.copy(Lane.FETCH, copies)
        event.synchronize()
        started, ended = event.times.started, event.times.ended
        assert started is not None and ended is not None, "a job that has ended has its times"
        times.append(ended - started)
    return sum(copy.source.numel() for copy in copies) / statistics.median(times[1:])


def _decode_speed(device: torch.device, rounds: int) -> dict[str, float]:
    """The fused decode of LLaDA rows to bfloat16: bytes read and written over the time of a device copy of as many."""
    rows = torch.randn(DECODE_ROWS, DECODE_WIDTH, device=device, dtype=torch.bfloat16)
    clusters = DECODE_ROWS // ROWS_PER_RECORD
    sizes = [ROWS_PER_RECORD] * clusters
    nbytes = codec_bytes(Codec.NVFP4_DELTA, ROWS_PER_RECORD, DECODE_WIDTH, element_bytes=2)
    room = -(-nbytes // 4096) * 4096
    buffer = torch.empty(clusters * room, dtype=torch.uint8, device=device)
    offsets = [number * room for number in range(clusters)]
    centroids, out = rows[:clusters].clone(), torch.empty_like(rows)
    codec = CODECS[Codec.NVFP4_DELTA]
    codec.encode(rows, sizes, buffer, offsets, centroids, list(range(clusters)))
    decode = _seconds(lambda: codec.decode(buffer, offsets, sizes, out.dtype, out, None, centroids), device, rounds)
    moved = clusters * nbytes + centroids.nbytes + out.nbytes
    half = torch.empty(moved // 2, dtype=torch.uint8, device=device)  # a copy reads and writes: as many bytes in all
    floor = _seconds(lambda: half.clone(), device, rounds)
    return {"decode_gb_per_s": moved / decode / 1e9, "decode_over_floor": decode / floor}


def _seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    stream, times = torch.cuda.current_stream(device), []
    for _ in range(1 + rounds):
        start = mark(stream)
        work()
        end = mark(stream)
        end.synchronize()
        times.append(ns_between(start, end) / 1e9)
    return statistics.median(times[1:])
