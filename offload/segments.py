"""Books: what torch's caching allocator takes of a CUDA device for what it is asked for. Integers only.

It gives out blocks of whole 512 bytes. Those up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from
segments of 20 MiB, and a larger block has a segment of its own, of whole 2 MiB (c10/cuda/CUDACachingAllocator.cpp).
With expandable segments it takes less.
"""

from collections import Counter
from collections.abc import Iterable

_BLOCK = 512
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
_LARGE, _LARGE_SEGMENT = 10 << 20, 20 << 20
_WHOLE = 2 << 20


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the segments of allocations of `sizes` bytes that are there at the same time. Those of different sizes
    share no segment here; in the allocator they may."""
    total = 0
    for block, count in Counter(-(-size // _BLOCK) * _BLOCK for size in sizes).items():
        if block >= _LARGE:
            total += count * (-(-block // _WHOLE) * _WHOLE)
        elif block:
            segment = _SMALL_SEGMENT if block <= _SMALL else _LARGE_SEGMENT
            total += -(-count // (segment // block)) * segment
    return total
