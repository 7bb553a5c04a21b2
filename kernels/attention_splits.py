"""Books: how `block_attention` on CUDA splits its work into programs, by sizes alone. Integers only."""

from functools import lru_cache
from typing import NamedTuple

from tiered.kernels.launch import PROGRAMS, RowTile, power_of_2, row_tile
from tiered.kernels.row_code import RowCode

LEAST_COLUMNS = 256  # of a program: fewer take less time than its start
PLAIN_HEAD = 128  # elements; a tile of a wider head has fewer columns and rows
MERGED = 1024  # elements of a tile of the second kernel: more would not fit the registers
LEAST_COPY = 4  # bytes of a thread: shorter copies to shared memory go through registers
_FLOAT32 = 4


class Tile(NamedTuple):
    """Rows and columns of a program's tile, its warps, and its pipeline stages. Tiles fit the registers of the threads,
    and 99 KiB of shared memory. There are two exceptions: codes with float32 queries in heads wider than `PLAIN_HEAD`,
    and any float32 in heads of 512. Products of float32 hold whole rows of both factors in registers."""

    rows: int
    columns: int
    warps: int
    stages: int


def tile_of(folded: int, *, head_dim: int, element_bytes: int, code: RowCode | None, made: bool = False) -> Tile:
    """The tile for heads of `head_dim`, if the heads that share keys have `folded` rows together. `made`: whether keys
    are made of values, which takes registers and shared memory too."""
    wide, widest, fp8 = head_dim > PLAIN_HEAD, head_dim > 2 * PLAIN_HEAD, code is RowCode.FP8
    if element_bytes == 2:
        rows = 16 if widest else 32 if wide or folded <= 32 else 64
        columns = rows if wide else 64
    else:
        rows, columns = 16, 16 if widest else 32
    many = widest and fp8 and not (made and element_bytes == 2)
    warps = 4 if rows == 32 and not wide and (not fp8 or head_dim <= 64) else 16 if many else 8
    if code is not None:  # decoded values take registers of their own
        columns = max(16, columns // (4 if rows == 64 and not fp8 else 2))
        least = -(-LEAST_COPY * 32 * warps // (head_dim if fp8 else head_dim // 2))
        columns = max(columns, min(64, power_of_2(least)))
    alone = made and widest and element_bytes == 4 and code is None
    return Tile(rows, columns, warps, 1 if alone else 2 if wide else 3)


def splits(tiles: int, length: int) -> int:
    """Number of splits of `length` columns, if one split takes `tiles` programs. It depends on sizes alone, not on the
    device, because the order of a sum decides its last bits."""
    return max(1, min(PROGRAMS // tiles, length // LEAST_COLUMNS))


@lru_cache(maxsize=1024)
def shared_splits(
    calls: tuple[tuple[int, int, int], ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    element_bytes: int,
    code: RowCode | None,
) -> int:
    """Number of splits of each row of several calls together: as many as the longest call needs, but no more than all
    have booked partial results for (`partial_rows`). By the lower ends of their buckets.

    Args:
        calls: the sequences of each, the rows of one, and the columns that these attend to.
    """
    sequences, rows = sum(count for count, *_ in calls), max(rows for _, rows, _ in calls)
    folded, longest = heads // kv_heads * rows, max(columns for *_, columns in calls)
    tile = tile_of(folded, head_dim=head_dim, element_bytes=element_bytes, code=code)
    wanted = splits(-(-folded // tile.rows) * sequences * kv_heads, bucket(longest)[0])
    booked = sum(
        partial_rows(count, heads, kv_heads, own, bucket(columns)[0], head_dim, element_bytes=element_bytes)
        for count, own, columns in calls
    )
    return max(1, min(wanted, booked // (heads * sum(count * own for count, own, _ in calls))))


def bucket(columns: int) -> tuple[int, int]:
    """The bucket of `columns`: it holds column counts above the first number, up to the second. All of a bucket are
    split alike, so one recorded launch serves all. There are four buckets to a doubling, none below `LEAST_COLUMNS`."""
    step = max(LEAST_COLUMNS, power_of_2(columns) // 8)
    most = -(-columns // step) * step
    return most - step, most


def partial_bytes(
    sequences: int, heads: int, kv_heads: int, rows: int, length: int, head_dim: int, *, element_bytes: int
) -> int:
    """Most bytes of partial results for the merge, with up to `rows` rows of each of up to `sequences` sequences: of
    each a float32 row, its peak and its mass."""
    sizes = sequences, heads, kv_heads, rows, length, head_dim
    return _FLOAT32 * (head_dim + 2) * partial_rows(*sizes, element_bytes=element_bytes)


def partial_rows(
    sequences: int, heads: int, kv_heads: int, rows: int, length: int, head_dim: int, *, element_bytes: int
) -> int:
    """Most partial results, one of each split, row and head."""
    most = length // LEAST_COLUMNS
    tile = tile_of(heads // kv_heads * rows, head_dim=head_dim, element_bytes=element_bytes, code=None)
    return min(most * sequences * heads * rows, PROGRAMS * tile.rows) if most > 1 else 0


def elements_block(head_dim: int) -> int:
    """Elements of a tile that holds whole heads; a matrix product takes at least 16."""
    return max(16, power_of_2(head_dim))


def elements(head_dim: int, code: RowCode | None) -> int:
    """Elements of a tile; of NVFP4, of its even or of its odd columns."""
    return elements_block(head_dim // (2 if code is RowCode.NVFP4 else 1))


def turning_elements(pairs: int, code: RowCode | None) -> int:
    """Elements of a tile of one element of each pair that turns; of NVFP4, of those of its even or of its odd pairs."""
    return elements_block(-(-pairs // (2 if code is RowCode.NVFP4 else 1)))


def merged_tile(head_dim: int) -> RowTile:
    """The tile of the second kernel."""
    return row_tile(elements_block(head_dim), MERGED)
