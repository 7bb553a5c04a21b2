"""Tiles of a weight inside Triton kernels: their values, and rows times a tile. A product reads a code once for a tile
of rows and decodes it in registers.

The product of a code and the scale of its group is exact in 16 bits, except in int4. The scale of a row multiplies the
sum. So sums are more accurate than those of the oracles, which round every value to the dtype of the rows.
"""

import triton
import triton.language as tl

from tiered.kernels.row_bits import bf16_values, byte_at, fp8_values, nvfp4_values


@triton.jit
def tile_product(
    row_start, given, weight, output, there, begin, stop, ROW: tl.constexpr, UPCAST: tl.constexpr, TILE: tl.constexpr
):
    """Sums of products, float32 [TILE.out, TILE.rows], of rows from `row_start` on with the weight's rows `output`,
    over columns from `begin`, a multiple of TILE.inner, to `stop`.

    `given` and `there` mask rows and outputs. `weight` points to the weight's first byte, at a multiple of 16. UPCAST
    to float32 for the interpreter, which multiplies no 16-bit numbers.
    """
    start = weight + output * ROW.row_bytes
    total = tl.full([TILE.out, TILE.rows], 0.0, tl.float32)
    for first in range(begin, stop, TILE.inner):
        column = first + tl.arange(0, TILE.inner)
        known = column < ROW.elements
        hidden = tl.load(row_start[:, None] + column[None, :], given[:, None] & known[None, :], other=0.0)
        if UPCAST:
            hidden = hidden.to(tl.float32)
        if ROW.group > 1:
            even_hidden, odd_hidden = tl.split(tl.reshape(hidden, (TILE.rows, TILE.inner // 2, 2)))
            even, odd = pair_values(start, first, there, ROW, TILE)
            total = tl.dot(even.to(hidden.dtype), tl.trans(even_hidden), total, input_precision="ieee")
            total = tl.dot(odd.to(hidden.dtype), tl.trans(odd_hidden), total, input_precision="ieee")
        else:
            own = there[:, None] & known[None, :]
            if ROW.group == 0:
                raw = start.to(tl.pointer_type(row_start.dtype.element_ty), bitcast=True)
                values = tl.load(raw[:, None] + column[None, :], own, other=0.0)
            else:
                values = byte_values(start, column, own, ROW)
            total = tl.dot(values.to(hidden.dtype), tl.trans(hidden), total, input_precision="ieee")
    if ROW.group != 0 and ROW.group != 32:  # neither raw values nor int4
        total *= weight_scales(start, there, ROW)[:, None]
    return total


@triton.jit
def weight_scales(start, there, ROW: tl.constexpr):
    """Scales of rows, float32 [TILE.out]; int4 has none."""
    return tl.load((start + ROW.scale_at).to(tl.pointer_type(tl.float32), bitcast=True), there, other=0.0)


@triton.jit
def byte_values(start, column, own, ROW: tl.constexpr):
    """Values of codes of a byte [TILE.out, columns], without the scale of the row."""
    codes = tl.load(start[:, None] + column[None, :], own, other=0)
    return fp8_values(codes) if ROW.fp8 else codes.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def pair_values(start, first, there, ROW: tl.constexpr, TILE: tl.constexpr):
    """Values of 4-bit codes [TILE.out, TILE.inner / 2], from column `first` on: even columns, and odd ones; of nvfp4
    without the scale of the row."""
    groups: tl.constexpr = TILE.inner // ROW.group
    byte = first // 2 + tl.arange(0, TILE.inner // 2)
    own = there[:, None] & (byte < ROW.code_bytes)[None, :]
    codes = tl.reshape(tl.load(start[:, None] + byte[None, :], own, other=0), (TILE.out, groups, ROW.group // 2))
    group = first // ROW.group + tl.arange(0, groups)
    known = there[:, None] & (group < ROW.code_bytes * 2 // ROW.group)[None, :]
    scales = start + ROW.code_bytes
    if ROW.group == 32:  # int4
        shorts = scales.to(tl.pointer_type(tl.uint16), bitcast=True)
        scale = bf16_values(tl.load(shorts[:, None] + group[None, :], known, other=0))[:, :, None]
        pairs = codes.to(tl.int32)
        even = tl.reshape((((pairs & 15) ^ 8) - 8).to(tl.float32) * scale, (TILE.out, TILE.inner // 2))
        odd = tl.reshape((((pairs >> 4) ^ 8) - 8).to(tl.float32) * scale, (TILE.out, TILE.inner // 2))
    else:
        block_scales = byte_at(scales[:, None], group[None, :], known)
        even, odd = nvfp4_values(codes, block_scales, tl.full([TILE.out], 1.0, tl.float32), TILE.out, groups)
    return even, odd
