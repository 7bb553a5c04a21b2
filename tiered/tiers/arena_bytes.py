"""Books: the memory that records take in an arena of slabs, at most, whatever the sizes of the clusters turn out to be.

A slab serves one size class at a time and holds as many of its slots as fit (`tiered.offload.slabs`). So a record takes
a share of a slab, up to a whole one where it is just over half as large; and of each class one slab may be filled in
part. Which sizes occur is known only once rows are clustered: this is the bound over all of them.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

from tiered.offload.slabs import SlabBook

SLAB_BYTES = 4 << 20  # of a slab at most, unless a record is larger


def arena_bytes(sizes: tuple[int, ...], *, rows: int, records: int, slab_bytes: int, store_bytes: int) -> int:
    """Bytes of the slabs that hold up to `records` records of up to `rows` rows in all, and one more staging slot of
    them while they are replaced; 0 for none.

    Args:
        sizes: bytes of a record by its rows, from one row to the most that a record has.
        rows, records: of all records together.
        slab_bytes: bytes of a slab.
        store_bytes: bytes of a staging slot that records leave from: its records stand beside those that they replace.
    """
    if not records:
        return 0
    shares, classes = _shares(sizes, slab_bytes)
    mean = min(rows / records, len(sizes))
    below = int(mean)
    share = shares[below] + (mean - below) * (shares[min(below + 1, len(sizes))] - shares[below])
    partly = sum(sorted(classes)[-records:])
    in_transit = -(-2 * store_bytes // slab_bytes)  # a record takes twice its share of a slab at most
    slabs = int(records * share + partly) + 1 + in_transit
    return slabs * slab_bytes


def best_slab(least_bytes: int, arena: Callable[[int], int]) -> int:
    """Bytes of the slab that records take the least memory with, at most. Large slabs lose little at their ends, and
    small ones little where the last of each size class is filled in part: many records want large ones.

    Args:
        least_bytes: that the largest record fits; a slab is one, two, four or more times that, up to `SLAB_BYTES`.
        arena: bytes of all slabs by those of one.
    """
    slabs = [least_bytes]
    while 2 * slabs[-1] <= SLAB_BYTES:
        slabs.append(2 * slabs[-1])
    return min(slabs, key=arena)


@cache
def _shares(sizes: tuple[int, ...], slab_bytes: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By rows of a record, from 0: the share of a slab that records of so many rows take on average, at most, with
    other records larger and smaller; and for each class, the share of its last slab that may be empty."""
    book = SlabBook(slab_bytes)
    slots = {book.room_for(size): book.slots_per_slab(size) for size in sizes}
    points = [0.0, *(1 / slots[book.room_for(size)] for size in sizes)]
    hull = [0]
    for right in range(1, len(points)):
        # The upper concave hull: a point below the line between its neighbours is on no worst mixture.
        while len(hull) > 1 and _slope(points, hull[-2], hull[-1]) <= _slope(points, hull[-1], right):
            hull.pop()
        hull.append(right)
    shares = list(points)
    for left, right in pairwise(hull):
        for rows in range(left, right + 1):
            shares[rows] = points[left] + (rows - left) * _slope(points, left, right)
    # More rows in the mean cannot take less: the total is a bound for fewer rows too.
    for rows in range(1, len(shares)):
        shares[rows] = max(shares[rows], shares[rows - 1])
    return tuple(shares), tuple(1 - 1 / count for count in slots.values())


def _slope(points: list[float], left: int, right: int) -> float:
    return (points[right] - points[left]) / (right - left)
