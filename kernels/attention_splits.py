"""Books: how `block_attention` on CUDA cuts its work into programs, by sizes alone. Integers only."""

from typing import NamedTuple

from tiered.kernels.row_code import RowCode

PROGRAMS = 264  # at a time: two a multiprocessor of an H100
LEAST_COLUMNS = 256  # of a program: fewer do not pay for its start
PLAIN_HEAD = 128  # elements; of a wider head a tile has fewer columns
LEAST_TILE = 16  # columns, the least that a matrix product takes
_FLOAT32 = 4


class Tile(NamedTuple):
    """Rows and columns that a program has at a time, its warps, and how many tiles of columns it has under way: as many
    as fit the registers of its threads, and 99 KiB of shared memory."""

    rows: int
    columns: int
    warps: int
    stages: int


def tile_of(folded: int, *, head_dim: int, element_bytes: int, code: RowCode | None) -> Tile:
    """The tile of a head of `head_dim`, if the heads that share keys have `folded` rows together. Codes take registers
    of their own, and so do products of float32."""
    wide = 1 << (-(-head_dim // PLAIN_HEAD) - 1).bit_length()  # times as wide as a plain head
    rows, columns = (32 if folded <= 32 or wide > 2 else 64, 64) if element_bytes == 2 else (16, 32)
    if code is not None:
        columns //= 4 if code is RowCode.NVFP4 and rows == 64 else 2
    warps = 4 if rows == 32 and wide <= 2 and (code is not RowCode.FP8 or wide > 1) else 8
    return Tile(rows, max(LEAST_TILE, columns // wide), warps, 3 if wide == 1 else 2)


def splits(tiles: int, length: int) -> int:
    """Parts of `length` columns, each with programs of its own, where all of them in one would have `tiles` programs.
    The order of a sum decides its last bits: so the number depends on sizes alone, not on the device."""
    return max(1, min(PROGRAMS // tiles, length // LEAST_COLUMNS))


def partial_bytes(
    sequences: int, heads: int, kv_heads: int, rows: int, length: int, head_dim: int, *, element_bytes: int
) -> int:
    """What the parts leave for their merge, at most, with up to `rows` rows of each of up to `sequences` sequences: of
    each row and part a row of float32, its peak and its mass."""
    most = length // LEAST_COLUMNS
    tile = tile_of(heads // kv_heads * rows, head_dim=head_dim, element_bytes=element_bytes, code=None)
    held = min(most * sequences * heads * rows, PROGRAMS * tile.rows) if most > 1 else 0
    return _FLOAT32 * (head_dim + 2) * held
