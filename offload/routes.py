"""Two ways for records over the bus, and which of them a record takes.

The copy engine takes no processor of the GPU, but each piece costs it some microseconds, so small records crawl. A
gather kernel of a few programs reads pinned memory itself: small records are as fast as large ones, at the price of the
processors that it holds. From some record size on the engine is as fast; where that is differs by device, so it is
measured.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple


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
