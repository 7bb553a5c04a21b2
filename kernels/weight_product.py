"""Rows times a coded weight in Triton. A few rows go a tile of both at a time; see tile_product.py. For many rows each
code would be decoded again for every tile of rows, so the weight is decoded first, in parts, and the library multiplies
them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.launch import PROGRAMS, launch, power_of_2
from tiered.kernels.row_code import RowLayout
from tiered.kernels.tile_product import byte_values, pair_values, tile_product, weight_scales
from tiered.kernels.weight_product_ref import DECODED_FROM, LEAST_COLUMNS, check_factors, decoded_rows


class Tile(NamedTuple):
    """Rows, output rows and columns of a program."""

    rows: int
    out: int
    inner: int


DECODED = Tile(1, 8, 512)  # a tile of a weight that is decoded first
MOST_SPLIT = 32  # rows of a tile whose columns are split: more would not fit the registers
ADDED = 1024  # numbers of a program that adds up sums


@triton.jit(do_not_specialize=["count", "turns"])
def _weight_product(
    rows, coded, product, count, out, turns, ROW: tl.constexpr, UPCAST: tl.constexpr, TILE: tl.constexpr
):
    # Tiles of rows vary fastest, so concurrent programs share a tile of the weight in the caches.
    row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    output = (tl.program_id(1) * TILE.out + tl.arange(0, TILE.out)).to(tl.int64)
    given, there = row < count, output < out
    row_start = rows + row.to(tl.int64) * ROW.elements
    if turns is None:
        total = tile_product(row_start, given, coded, output, there, 0, ROW.elements, ROW, UPCAST, TILE)
    else:
        # Counted in tiles, so that the compiler knows how columns are aligned, and loads whole vectors of codes.
        begin = tl.program_id(2) * turns * TILE.inner
        stop = tl.minimum(begin + turns * TILE.inner, ROW.elements)
        total = tile_product(row_start, given, coded, output, there, begin, stop, ROW, UPCAST, TILE)
        product += tl.program_id(2) * count * out  # less than 2^31, since a split fills few programs
    target = product + row.to(tl.int64)[None, :] * out + output[:, None]
    tl.store(target, total.to(product.dtype.element_ty), there[:, None] & given[None, :])


@triton.jit(do_not_specialize=["numbers", "splits"])
def _add_splits(parts, product, numbers, splits, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    there = at < numbers
    total = tl.full([NUMBERS], 0.0, tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * numbers + at, there, other=0.0)
    tl.store(product + at, total.to(product.dtype.element_ty), there)


@triton.jit
def _decode_weight(coded, values, out, ROW: tl.constexpr, TILE: tl.constexpr):
    output = (tl.program_id(0) * TILE.out + tl.arange(0, TILE.out)).to(tl.int64)
    first = tl.program_id(1) * TILE.inner
    column, there = first + tl.arange(0, TILE.inner), output < out
    own = there[:, None] & (column < ROW.elements)[None, :]
    start = coded + output * ROW.row_bytes
    if ROW.group > 1:
        even, odd = pair_values(start, first, there, ROW, TILE)
        found = tl.interleave(even, odd)
    else:
        found = byte_values(start, column, own, ROW)
    if ROW.group != 32:  # int4
        found *= weight_scales(start, there, ROW)[:, None]
    target = values + output[:, None] * ROW.elements + column[None, :]
    tl.store(target, found.to(values.dtype.element_ty), own)


def weight_product(rows: Float[Tensor, "n inner"], weight: CodedRows) -> Float[Tensor, "n out"]:
    """As in weight_product_ref.py, but contiguous. The weight begins at a multiple of 16 bytes."""
    check_factors(rows, weight)
    rows, count = rows.contiguous(), len(rows)
    product = rows.new_empty(count, weight.shape[0])
    if product.numel():
        (product_by_parts if count >= DECODED_FROM else product_by_tiles)(rows, weight, product)
    return product


def product_by_tiles(rows: Float[Tensor, "n inner"], weight: CodedRows, product: Float[Tensor, "n out"]) -> None:
    """Write the product, from codes. If there are too few tiles to fill a GPU, programs share the columns of one, and a
    second kernel adds up their sums in order."""
    count, (out, inner) = len(rows), weight.shape
    tile = tile_of(count, rows.element_size())
    tiles = -(-count // tile.rows), -(-out // tile.out)
    splits = max(1, min(PROGRAMS // (tiles[0] * tiles[1]), inner // LEAST_COLUMNS)) if tile.rows <= MOST_SPLIT else 1
    turns = None if splits == 1 else -(-inner // (splits * tile.inner))
    parts = product if splits == 1 else rows.new_empty(splits, count, out, dtype=torch.float32)
    options = {"ROW": RowLayout.of(weight.code, inner), "UPCAST": not rows.is_cuda, "TILE": tile}
    arguments = rows, weight.bytes, parts, count, out, turns
    launch(_weight_product, (*tiles, splits), *arguments, **options, num_warps=warps_of(tile), on=rows)
    if splits > 1:
        numbers = product.numel()
        launch(_add_splits, (-(-numbers // ADDED),), parts, product, numbers, splits, NUMBERS=ADDED, on=rows)


def product_by_parts(rows: Float[Tensor, "n inner"], weight: CodedRows, product: Float[Tensor, "n out"]) -> None:
    """Write the product, from decoded parts of the weight."""
    out, inner = weight.shape
    values, row = rows.new_empty(decoded_rows(out, inner), inner), RowLayout.of(weight.code, inner)
    for first in range(0, out, len(values)):
        part = weight.bytes[first : first + len(values)]
        some = values[: len(part)]
        grid = -(-len(part) // DECODED.out), -(-inner // DECODED.inner)
        launch(_decode_weight, grid, part, some, len(part), ROW=row, TILE=DECODED, on=rows)
        torch.mm(rows, some.t(), out=product[:, first : first + len(part)])


def tile_of(count: int, element_bytes: int) -> Tile:
    """The tile for `count` rows that fits the registers of its warps."""
    return Tile(16, 32, 64) if element_bytes == 4 else Tile(min(128, max(16, power_of_2(count))), 64, 64)


def warps_of(tile: Tile) -> int:
    return 8 if tile.rows == 128 else 4
