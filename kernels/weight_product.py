"""Rows times a coded weight in Triton: its codes are read once for a tile of rows and become values in registers.

What a value's code and the scale of its group make is exact in 16 bits, but for int4; the scale of a row multiplies the
sum. So sums are nearer to the truth than those of the oracle, which rounds every value to the dtype of the rows.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.launch import launch
from tiered.kernels.row_bits import bf16_values, fp8_values, nvfp4_values
from tiered.kernels.row_code import Code, WeightCode
from tiered.kernels.weight_product_ref import check_factors


@triton.jit
def _pairs(
    start, shorts, output, first, there,
    GROUP: tl.constexpr, CODE_BYTES: tl.constexpr, ROW_BYTES: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """Values of codes of 4 bits [BLOCK_OUT, BLOCK_INNER / 2], from column `first` on: even columns, and odd ones; of
    nvfp4 before the scale of the row."""
    groups: tl.constexpr = BLOCK_INNER // GROUP
    byte = first // 2 + tl.arange(0, BLOCK_INNER // 2)
    own = there[:, None] & (byte < CODE_BYTES)[None, :]
    codes = tl.reshape(tl.load(start[:, None] + byte[None, :], own, other=0), (BLOCK_OUT, groups, GROUP // 2))
    group = first // GROUP + tl.arange(0, groups)
    known = there[:, None] & (group < CODE_BYTES * 2 // GROUP)[None, :]
    if GROUP == 32:  # int4
        at = (output * (ROW_BYTES // 2) + CODE_BYTES // 2)[:, None] + group[None, :]
        scale = bf16_values(tl.load(shorts + at, known, other=0).to(tl.uint16, bitcast=True))[:, :, None]
        pairs = codes.to(tl.int32)
        even = tl.reshape((((pairs & 15) ^ 8) - 8).to(tl.float32) * scale, (BLOCK_OUT, BLOCK_INNER // 2))
        odd = tl.reshape((((pairs >> 4) ^ 8) - 8).to(tl.float32) * scale, (BLOCK_OUT, BLOCK_INNER // 2))
    else:
        block_scales = tl.load(start[:, None] + (CODE_BYTES + group)[None, :], known, other=0)
        even, odd = nvfp4_values(codes, block_scales, tl.full([BLOCK_OUT], 1.0, tl.float32), BLOCK_OUT, groups)
    return even, odd


@triton.jit(do_not_specialize=["count"])
def _weight_product(
    rows, coded, shorts, words, product, count, out,
    INNER: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, CODE_BYTES: tl.constexpr, ROW_SCALE: tl.constexpr,
    ROW_BYTES: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    # Tiles of rows come first: programs at the same time share a tile of the weight, which caches then hold.
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = (tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)).to(tl.int64)
    given, there = row < count, output < out
    start = coded + output * ROW_BYTES
    row_start = rows + row.to(tl.int64) * INNER
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for first in range(0, INNER, BLOCK_INNER):
        column = first + tl.arange(0, BLOCK_INNER)
        own = given[:, None] & (column < INNER)[None, :]
        hidden = tl.load(row_start[:, None] + column[None, :], own, other=0.0)
        if UPCAST:
            hidden = hidden.to(tl.float32)
        if GROUP > 1:
            even_hidden, odd_hidden = tl.split(tl.reshape(hidden, (BLOCK_ROWS, BLOCK_INNER // 2, 2)))
            even, odd = _pairs(
                start, shorts, output, first, there, GROUP, CODE_BYTES, ROW_BYTES, BLOCK_OUT, BLOCK_INNER
            )
            total = tl.dot(even.to(hidden.dtype), tl.trans(even_hidden), total, input_precision="ieee")
            total = tl.dot(odd.to(hidden.dtype), tl.trans(odd_hidden), total, input_precision="ieee")
        else:
            codes = tl.load(start[:, None] + column[None, :], there[:, None] & (column < INNER)[None, :], other=0)
            values = fp8_values(codes) if FP8 else codes.to(tl.int8, bitcast=True).to(tl.float32)
            total = tl.dot(values.to(hidden.dtype), tl.trans(hidden), total, input_precision="ieee")
    if GROUP != 32:  # all but int4
        total *= tl.load(words + output * (ROW_BYTES // 4) + ROW_SCALE // 4, there, other=0.0)[:, None]
    target = product + row.to(tl.int64)[None, :] * out + output[:, None]
    tl.store(target, total.to(product.dtype.element_ty), there[:, None] & given[None, :])


def weight_product(rows: Float[Tensor, "n inner"], weight: CodedRows) -> Float[Tensor, "n out"]:
    """As in weight_product_ref.py, but contiguous. The weight begins at a whole 16 bytes."""
    check_factors(rows, weight)
    rows, count, (out, inner) = rows.contiguous(), len(rows), weight.shape
    product = rows.new_empty(count, out)
    if product.numel():
        tile = tile_of(count, rows.element_size())
        launch(
            _weight_product, (-(-count // tile["BLOCK_ROWS"]), -(-out // tile["BLOCK_OUT"])), rows, weight.bytes,
            weight.bytes.view(torch.int16), weight.bytes.view(torch.float32), product, count, out,
            **_layout(weight.code, inner),
            UPCAST=not rows.is_cuda, **tile, num_warps=warps_of(tile), on=rows,
        )  # fmt: skip
    return product


def _layout(code: Code, inner: int) -> dict[str, int | bool]:
    """How a row is coded, and where its parts are."""
    parts = {
        "CODE_BYTES": code.code_bytes(inner),
        "ROW_SCALE": code.scale_at(inner),
        "ROW_BYTES": code.row_bytes(inner),
    }
    return {"INNER": inner, "FP8": code is WeightCode.FP8, "GROUP": code.group, **parts}


def tile_of(count: int, element_bytes: int) -> dict[str, int]:
    """Rows, output rows and columns of a program, for `count` rows: what fits the registers of its warps."""
    if element_bytes == 4:
        return {"BLOCK_ROWS": 16, "BLOCK_OUT": 32, "BLOCK_INNER": 64}
    return {"BLOCK_ROWS": min(128, max(16, triton.next_power_of_2(count))), "BLOCK_OUT": 64, "BLOCK_INNER": 64}


def warps_of(tile: dict[str, int]) -> int:
    return 8 if tile["BLOCK_ROWS"] == 128 else 4
