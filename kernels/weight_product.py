"""Rows times a coded weight in Triton: its codes are read once for a tile of rows and become values in registers.

What a value's code and the scale of its group make is exact in 16 bits, but for int4; the scale of a row multiplies the
sum. So sums are nearer to the truth than those of the oracle, which rounds every value to the dtype of the rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.launch import launch
from tiered.kernels.row_bits import bf16_values, fp8_values, nvfp4_values
from tiered.kernels.row_code import RowLayout
from tiered.kernels.weight_product_ref import check_factors


class Tile(NamedTuple):
    """Rows, output rows and columns of a program."""

    rows: int
    out: int
    inner: int


@triton.jit
def _pairs(start, shorts, output, first, there, ROW: tl.constexpr, TILE: tl.constexpr):
    """Values of codes of 4 bits [TILE.out, TILE.inner / 2], from column `first` on: even columns, and odd ones; of
    nvfp4 before the scale of the row."""
    groups: tl.constexpr = TILE.inner // ROW.group
    byte = first // 2 + tl.arange(0, TILE.inner // 2)
    own = there[:, None] & (byte < ROW.code_bytes)[None, :]
    codes = tl.reshape(tl.load(start[:, None] + byte[None, :], own, other=0), (TILE.out, groups, ROW.group // 2))
    group = first // ROW.group + tl.arange(0, groups)
    known = there[:, None] & (group < ROW.code_bytes * 2 // ROW.group)[None, :]
    if ROW.group == 32:  # int4
        at = (output * (ROW.row_bytes // 2) + ROW.code_bytes // 2)[:, None] + group[None, :]
        scale = bf16_values(tl.load(shorts + at, known, other=0).to(tl.uint16, bitcast=True))[:, :, None]
        pairs = codes.to(tl.int32)
        even = tl.reshape((((pairs & 15) ^ 8) - 8).to(tl.float32) * scale, (TILE.out, TILE.inner // 2))
        odd = tl.reshape((((pairs >> 4) ^ 8) - 8).to(tl.float32) * scale, (TILE.out, TILE.inner // 2))
    else:
        block_scales = tl.load(start[:, None] + (ROW.code_bytes + group)[None, :], known, other=0)
        even, odd = nvfp4_values(codes, block_scales, tl.full([TILE.out], 1.0, tl.float32), TILE.out, groups)
    return even, odd


@triton.jit(do_not_specialize=["count"])
def _weight_product(
    rows, coded, shorts, words, product, count, out, ROW: tl.constexpr, UPCAST: tl.constexpr, TILE: tl.constexpr
):
    # Tiles of rows come first: programs at the same time share a tile of the weight, which caches then hold.
    row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    output = (tl.program_id(1) * TILE.out + tl.arange(0, TILE.out)).to(tl.int64)
    given, there = row < count, output < out
    start = coded + output * ROW.row_bytes
    row_start = rows + row.to(tl.int64) * ROW.elements
    total = tl.full([TILE.out, TILE.rows], 0.0, tl.float32)
    for first in range(0, ROW.elements, TILE.inner):
        column = first + tl.arange(0, TILE.inner)
        own = given[:, None] & (column < ROW.elements)[None, :]
        hidden = tl.load(row_start[:, None] + column[None, :], own, other=0.0)
        if UPCAST:
            hidden = hidden.to(tl.float32)
        if ROW.group > 1:
            even_hidden, odd_hidden = tl.split(tl.reshape(hidden, (TILE.rows, TILE.inner // 2, 2)))
            even, odd = _pairs(start, shorts, output, first, there, ROW, TILE)
            total = tl.dot(even.to(hidden.dtype), tl.trans(even_hidden), total, input_precision="ieee")
            total = tl.dot(odd.to(hidden.dtype), tl.trans(odd_hidden), total, input_precision="ieee")
        else:
            codes = tl.load(
                start[:, None] + column[None, :], there[:, None] & (column < ROW.elements)[None, :], other=0
            )
            values = fp8_values(codes) if ROW.fp8 else codes.to(tl.int8, bitcast=True).to(tl.float32)
            total = tl.dot(values.to(hidden.dtype), tl.trans(hidden), total, input_precision="ieee")
    if ROW.group != 32:  # all but int4
        total *= tl.load(words + output * (ROW.row_bytes // 4) + ROW.scale_at // 4, there, other=0.0)[:, None]
    target = product + row.to(tl.int64)[None, :] * out + output[:, None]
    tl.store(target, total.to(product.dtype.element_ty), there[:, None] & given[None, :])


def weight_product(rows: Float[Tensor, "n inner"], weight: CodedRows) -> Float[Tensor, "n out"]:
    """As in weight_product_ref.py, but contiguous. The weight begins at a whole 16 bytes."""
    check_factors(rows, weight)
    rows, count, (out, inner) = rows.contiguous(), len(rows), weight.shape
    product = rows.new_empty(count, out)
    if product.numel():
        tile = tile_of(count, rows.element_size())
        grid = -(-count // tile.rows), -(-out // tile.out)
        tensors = rows, weight.bytes, weight.bytes.view(torch.int16), weight.bytes.view(torch.float32), product
        options = {"ROW": RowLayout.of(weight.code, inner), "UPCAST": not rows.is_cuda, "TILE": tile}
        launch(_weight_product, grid, *tensors, count, out, **options, num_warps=warps_of(tile), on=rows)
    return product


def tile_of(count: int, element_bytes: int) -> Tile:
    """The tile for `count` rows: what fits the registers of its warps."""
    return Tile(16, 32, 64) if element_bytes == 4 else Tile(min(128, max(16, triton.next_power_of_2(count))), 64, 64)


def warps_of(tile: Tile) -> int:
    return 8 if tile.rows == 128 else 4
