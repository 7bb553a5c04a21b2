"""Books: bytes that torch's caching allocator reserves on a CUDA device for allocations. Integers only.

It allocates blocks in multiples of 512 bytes. Blocks up to 1 MiB are cut from segments of 2 MiB, and blocks below
10 MiB from segments of 20 MiB. A larger block has a segment of its own, a multiple of 2 MiB
(c10/cuda/CUDACachingAllocator.cpp). With expandable segments it reserves less.
"""

from collections import Counter
from collections.abc import Iterable

_BLOCK = 512
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
_LARGE, _LARGE_SEGMENT = 10 << 20, 20 << 20
_WHOLE = 2 << 20


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the segments of simultaneous allocations of `sizes` bytes. An upper bound: allocations of different
    sizes share no segment here, but may in the allocator."""
    total = 0
    for block, count in Counter(-(-size // _BLOCK) * _BLOCK for size in sizes).items():
        if block >= _LARGE:
            total += count * (-(-block // _WHOLE) * _WHOLE)
        elif block:
            segment = _SMALL_SEGMENT if block <= _SMALL else _LARGE_SEGMENT
            total += -(-count // (segment // block)) * segment
    return total
