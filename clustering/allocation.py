"""Books: the numbers of clusters of the current block's prefix and suffix, and the size of the largest."""

from collections.abc import Sequence
from typing import Literal

# A record of 64 rows is large enough for the link's full speed, and an update of M clusters recomputes about 64·M rows
# in any context.
ROWS_PER_CLUSTER = 64
# Larger clusters are split if their number is not fixed by the user.
MOST_ROWS_PER_CLUSTER = 4 * ROWS_PER_CLUSTER


def auto_clusters(*area_rows: int) -> int:
    """Number of clusters for `clusters="auto"` over areas of `area_rows`: about one for 64 rows, and at least one for
    each area with rows."""
    nearest = (sum(area_rows) + ROWS_PER_CLUSTER // 2) // ROWS_PER_CLUSTER
    return max(nearest, sum(rows > 0 for rows in area_rows))


def chosen_clusters(top_m: int | Literal["auto"], clusters: int, *, single: bool) -> int:
    """Number of `clusters` that an update chooses, at most `top_m`. "auto" is 4, or for clusters of one row (`single`)
    8 and one more per 32."""
    most = top_m if top_m != "auto" else 8 + clusters // 32 if single else 4
    return min(most, clusters)


def allocate_clusters(clusters: int, prefix_rows: int, suffix_rows: int) -> tuple[int, int]:
    """`clusters` shared between prefix and suffix in proportion to their rows, rounded half up for the prefix.

    An area with rows gets at least one cluster, no area gets more clusters than rows, and the shares sum to `clusters`.

    Raises:
        ValueError: fewer clusters than areas with rows, or more clusters than rows.
    """
    rows = prefix_rows + suffix_rows
    fewest = (prefix_rows > 0) + (suffix_rows > 0)
    if not fewest <= clusters <= rows:
        raise ValueError(
            f"clusters = {clusters} cannot be shared between a prefix of {prefix_rows} and a suffix of {suffix_rows} "
            f"rows; allowed: {fewest} to {rows}"
        )
    if rows == 0:
        return 0, 0
    nearest = (2 * clusters * prefix_rows + rows) // (2 * rows)
    lowest = max(int(prefix_rows > 0), clusters - suffix_rows)
    highest = min(prefix_rows, clusters - int(suffix_rows > 0))
    prefix = min(max(nearest, lowest), highest)
    return prefix, clusters - prefix


def cut_sizes(sizes: Sequence[int], most_rows: int) -> tuple[int, ...]:
    """Sizes of the clusters that clusters of `sizes` rows are cut into, in order: as few as possible, of at most
    `most_rows` rows.

    The parts of a cluster differ by at most one row, larger ones first. An empty cluster has none.
    """
    parts = [(size, -(-size // most_rows)) for size in sizes]
    return tuple(size // count + (number < size % count) for size, count in parts for number in range(count))
