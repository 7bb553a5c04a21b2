"""Two ways for records over the bus, and which of them a record takes.

The copy engine takes no processor of the GPU, but each piece costs it some microseconds, so small records crawl. A
gather kernel of a few programs reads pinned memory itself: small records are as fast as large ones, at the price of the
processors that it holds. From some record size on the engine is as fast; where that is differs by device, so it is
measured.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.kernels.byte_segments import ALIGNMENT, check_segments
from tiered.kernels.host_values import on_device
from tiered.offload.device_timer import device_times
from tiered.offload.transport import Copy

PROGRAMS = 4  # thread blocks: enough for the link (a few hundred KiB under way), few enough to leave to the model
SIZES = tuple(1 << power for power in range(10, 18))  # of records that are timed: 1 KiB to 128 KiB
RECORDS = 64  # at a time, scattered over twice their bytes
REPEATS = 7
_crossovers: dict[str, int] = {}  # by device name


class Segment(NamedTuple):
    """Bytes that move: from offset `source` to offset `destination`."""

    source: int
    destination: int
    size: int


class Route(StrEnum):
    """How bytes cross the bus."""

    ENGINE = "engine"
    GATHER = "gather"


def neighbours_merged(segments: Iterable[tuple[int, int, int]]) -> list[Segment]:
    """The same bytes in as few segments as possible: those that touch on both sides become one.

    Args:
        segments: (source, destination, size) in bytes, sorted by source. Empty ones vanish.

    Raises:
        ValueError: a negative number, or segments out of order.
    """
    merged: list[Segment] = []
    last = 0
    for source, destination, size in segments:
        if min(source, destination, size) < 0:
            raise ValueError(f"a segment cannot be negative: {(source, destination, size)}")
        if source < last:
            raise ValueError(f"segments have to be sorted by source: {source} comes after {last}")
        last = source
        if size == 0:
            continue
        before = merged[-1] if merged else Segment(0, 0, 0)
        if before.size and (before.source + before.size, before.destination + before.size) == (source, destination):
            merged[-1] = before._replace(size=before.size + size)
        else:
            merged.append(Segment(source, destination, size))
    return merged


@dataclass(frozen=True, slots=True)
class Gather:
    """Segments of one buffer, pinned host memory, that go to one buffer on the device."""

    source: UInt8[Tensor, " source_bytes"]
    destination: UInt8[Tensor, " destination_bytes"]
    segments: Sequence[Segment]

    def launch(self, device: torch.device) -> None:
        """Copy on the current stream of `device`."""
        from tiered.kernels.gather_copy import gather_copy

        source, destination, sizes = on_device(list(zip(*self.segments, strict=True)), device)
        gather_copy(self.source, source, self.destination, destination, sizes, programs=PROGRAMS)


def gather_of(pieces: Sequence[Copy]) -> Gather | None:
    """The pieces (see `check_copies`) as one gather; None where they lie in several buffers at either side, where their
    destinations overlap, or where an address or size is not a multiple of 16 bytes."""
    source, destination = _buffer(pieces[0].source), _buffer(pieces[0].destination)
    buffers = source.data_ptr(), destination.data_ptr()
    for piece in pieces:
        if (piece.source.untyped_storage().data_ptr(), piece.destination.untyped_storage().data_ptr()) != buffers:
            return None
    segments = [
        Segment(int(piece.source.storage_offset()), int(piece.destination.storage_offset()), piece.source.numel())
        for piece in pieces
    ]
    try:
        check_segments(
            *([segment[field] for segment in segments] for field in range(3)),
            source_bytes=source.numel(),
            destination_bytes=destination.numel(),
        )
    except ValueError:
        return None
    return None if any(address % ALIGNMENT for address in buffers) else Gather(source, destination, segments)


def measure_crossover(time_of: Callable[[Route, int], float], sizes: Sequence[int]) -> int:
    """The record size in bytes from which the copy engine is the better route.

    Each size is timed once on each route. The split that loses least over all of them wins, each counted by the
    logarithm of its ratio; so one wrong time does not move the split past sizes that are clear. A tie is the engine's,
    which leaves the processors to the model.

    Args:
        time_of: seconds for as many records of a size as the timer likes, the same for both routes.
        sizes: record sizes to try, rising.

    Returns:
        One of `sizes`; 0 where the engine wins everywhere, `sys.maxsize` where it wins nowhere.

    Raises:
        ValueError: no sizes, sizes that do not rise from 1 or more, or a time that is not positive.
    """
    if not sizes or sizes[0] < 1 or any(small >= large for small, large in itertools.pairwise(sizes)):
        raise ValueError(f"sizes = {list(sizes)} must be one or more, rising from 1 or more")
    loss, least, crossover = 0.0, 0.0, 0
    for size, larger in zip(sizes, [*sizes[1:], sys.maxsize], strict=True):
        engine, gather = time_of(Route.ENGINE, size), time_of(Route.GATHER, size)
        if not (0 < engine < math.inf and 0 < gather < math.inf):
            raise ValueError(f"records of {size} bytes took {engine} s by engine and {gather} s by gather")
        loss += math.log(gather / engine)  # of the gather, should it take this size too
        if loss < least:
            least, crossover = loss, larger
    return crossover


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


def _buffer(part: Tensor) -> UInt8[Tensor, " bytes"]:
    """All the memory that `part` is a view of."""
    storage = part.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=part.device).set_(storage, 0, (storage.nbytes(),), (1,))
