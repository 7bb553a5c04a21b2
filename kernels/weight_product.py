"""Rows times a coded weight in Triton, a tile of both at a time; see tile_product.py."""

from typing import NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.launch import launch, power_of_2
from tiered.kernels.row_code import RowLayout
from tiered.kernels.tile_product import tile_product
from tiered.kernels.weight_product_ref import check_factors


class Tile(NamedTuple):
    """Rows, output rows and columns of a program."""

    rows: int
    out: int
    inner: int


@triton.jit(do_not_specialize=["count"])
def _weight_product(rows, coded, product, count, out, ROW: tl.constexpr, UPCAST: tl.constexpr, TILE: tl.constexpr):
    # Tiles of rows vary fastest, so concurrent programs share a tile of the weight in the caches.
    row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    output = (tl.program_id(1) * TILE.out + tl.arange(0, TILE.out)).to(tl.int64)
    given, there = row < count, output < out
    row_start = rows + row.to(tl.int64) * ROW.elements
    total = tile_product(row_start, given, coded, output, there, ROW, UPCAST, TILE)
    target = product + row.to(tl.int64)[None, :] * out + output[:, None]
    tl.store(target, total.to(product.dtype.element_ty), there[:, None] & given[None, :])


def weight_product(rows: Float[Tensor, "n inner"], weight: CodedRows) -> Float[Tensor, "n out"]:
    """As in weight_product_ref.py, but contiguous. The weight begins at a multiple of 16 bytes."""
    check_factors(rows, weight)
    rows, count, (out, inner) = rows.contiguous(), len(rows), weight.shape
    product = rows.new_empty(count, out)
    if product.numel():
        tile = tile_of(count, rows.element_size())
        grid = -(-count // tile.rows), -(-out // tile.out)
        options = {"ROW": RowLayout.of(weight.code, inner), "UPCAST": not rows.is_cuda, "TILE": tile}
        arguments = rows, weight.bytes, product, count, out
        launch(_weight_product, grid, *arguments, **options, num_warps=warps_of(tile), on=rows)
    return product


def tile_of(count: int, element_bytes: int) -> Tile:
    """The tile for `count` rows that fits the registers of its warps."""
    return Tile(16, 32, 64) if element_bytes == 4 else Tile(min(128, max(16, power_of_2(count))), 64, 64)


def warps_of(tile: Tile) -> int:
    return 8 if tile.rows == 128 else 4
