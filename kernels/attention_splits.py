"""Books: how `block_attention` on CUDA cuts its work into programs, by sizes alone. Integers only."""

from typing import NamedTuple

PROGRAMS = 264  # at a time: two a multiprocessor of an H100
LEAST_COLUMNS = 256  # of a program: fewer do not pay for its start
_FLOAT32 = 4


class Tile(NamedTuple):
    """Rows and columns that a program has at a time, and its warps: what fits the registers of so many."""

    rows: int
    columns: int
    warps: int


def tile_of(folded: int, *, element_bytes: int, coded: bool) -> Tile:
    """Where the heads that share keys have `folded` rows together. What is coded takes registers of its own, and so do
    products of float32."""
    rows, columns = (32 if folded <= 32 else 64, 64) if element_bytes == 2 else (16, 32)
    return Tile(rows, columns // 2 if coded else columns, 4 if rows == 32 else 8)


def splits(tiles: int, length: int) -> int:
    """Parts of `length` columns, each with programs of its own, where all of them in one would have `tiles` programs.
    The order of a sum decides its last bits: so this hangs on sizes, and on nothing that a device says."""
    return max(1, min(PROGRAMS // tiles, length // LEAST_COLUMNS))


def partial_bytes(
    sequences: int, heads: int, kv_heads: int, rows: int, length: int, head_dim: int, *, element_bytes: int
) -> int:
    """What the parts leave for their merge, at most, with up to `rows` rows of each of up to `sequences` sequences: of
    each row and part a row of float32, its peak and its mass."""
    most = length // LEAST_COLUMNS
    tile = tile_of(heads // kv_heads * rows, element_bytes=element_bytes, coded=False)
    held = min(most * sequences * heads * rows, PROGRAMS * tile.rows) if most > 1 else 0
    return _FLOAT32 * (head_dim + 2) * held
