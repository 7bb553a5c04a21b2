"""Parts of `block_attention` in Triton: loads of stored rows, and the soft cap."""

from typing import NamedTuple

import triton
import triton.language as tl

from tiered.kernels.row_bits import fp8_values, nvfp4_values, row_scales
from tiered.kernels.row_code import RowCode

CODES = {None: 0, RowCode.FP8: 1, RowCode.NVFP4: 2}
_RAW, _FP8 = tl.constexpr(CODES[None]), tl.constexpr(CODES[RowCode.FP8])


class Form(NamedTuple):
    """The code of keys and values by `CODES`, elements of a head, and rows, columns and elements of a tile."""

    code: int
    head_dim: int
    rows: int
    keys: int
    elements: int


@triton.jit
def soft_capped(scores, soft_cap):
    """c · tanh(scores / c), because Triton has no tanh. Near 0 by its series, because 1 − e⁻²ˣ would cancel there."""
    x = scores / soft_cap
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    fallen = tl.exp(-2 * tl.abs(x))
    ratio = (1 - fallen) / (1 + fallen)
    return soft_cap * tl.where(square < 1 / 16, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def rows_at(start, column, column_stride, element_stride, seen, ALIGNED: tl.constexpr, FORM: tl.constexpr):
    """Rows of keys or values [FORM.keys, FORM.elements], twice; in NVFP4 their even elements, and their odd ones. Each
    begins at a multiple of ALIGNED bytes. The hint is here, because the compiler drops hints on a helper's
    arguments."""
    at = column.to(tl.int64) * column_stride
    element = tl.arange(0, FORM.elements)
    own = seen[:, None] & (element < FORM.head_dim)[None, :]
    if FORM.code == _RAW:
        row = tl.multiple_of(start + at, [ALIGNED])
        even = tl.load(row[:, None] + (element * element_stride)[None, :], own, other=0.0)
        odd = even
    else:
        row = tl.multiple_of(start + at * 4, [ALIGNED])
        if FORM.code == _FP8:
            codes = tl.load(row[:, None] + element[None, :], own, other=0)
            scale = row_scales(tl.load(row + FORM.head_dim, seen, other=1))
            even = fp8_values(codes) * scale[:, None]
            odd = even
        else:
            group = tl.arange(0, FORM.elements // 8)
            own = seen[:, None] & (group < FORM.head_dim // 16)[None, :]
            byte = (group * 8)[:, None] + tl.arange(0, 8)[None, :]
            codes = tl.load(row[:, None, None] + byte[None, :, :], own[:, :, None], other=0)
            block_scales = tl.load(row[:, None] + (FORM.head_dim // 2 + group)[None, :], own, other=0)
            scale = row_scales(tl.load(row + FORM.head_dim // 16 * 9, seen, other=1))
            even, odd = nvfp4_values(codes, block_scales, scale, FORM.keys, FORM.elements // 8)
    return even, odd
