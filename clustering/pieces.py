"""Books: clusters cut into pieces that are small enough for one record. Integers only."""

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Rows `start` to `stop` (exclusive) of the cluster-major rows, all of them members of `cluster`."""

    cluster: int
    start: int
    stop: int


def pieces(sizes: Sequence[int], max_rows: int) -> tuple[Piece, ...]:
    """Clusters of `sizes` rows, laid one after the other, in as few pieces of at most `max_rows` as each allows.

    The pieces of a cluster differ by at most one row, larger ones first; an empty cluster has none.

    Raises:
        ValueError: a negative size, or `max_rows` below 1.
    """
    if max_rows < 1 or any(size < 0 for size in sizes):
        raise ValueError(f"max_rows = {max_rows} must be 1 or more, and sizes 0 or more: {list(sizes)}")
    cut = []
    start = 0
    for cluster, size in enumerate(sizes):
        count = -(-size // max_rows)
        for number in range(count):
            stop = start + size // count + (number < size % count)
            cut.append(Piece(cluster, start, stop))
            start = stop
    return tuple(cut)
