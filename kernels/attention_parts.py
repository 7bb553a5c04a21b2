"""Parts of `block_attention` in Triton: loads of stored rows, and the soft cap."""

from typing import NamedTuple

import triton
import triton.language as tl

from tiered.kernels.row_bits import byte_at, fp8_values, nvfp4_values, row_scales
from tiered.kernels.row_code import RowCode

CODES = {None: 0, RowCode.FP8: 1, RowCode.NVFP4: 2}
_RAW, _FP8 = tl.constexpr(CODES[None]), tl.constexpr(CODES[RowCode.FP8])


class Form(NamedTuple):
    """The code of keys and values by `CODES`, elements of a head, and rows, columns and elements of a tile. If keys are
    made of values: the pairs of elements that turn, -1 if keys are stored; and the elements of a tile of one half of
    them."""

    code: int
    head_dim: int
    rows: int
    keys: int
    elements: int
    pairs: int = -1
    turning: int = 16


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
def rows_at(
    start, column, column_stride, element_stride, seen, ALIGNED: tl.constexpr, FORM: tl.constexpr,
    FIRST: tl.constexpr, FILLED: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Rows of keys or values [FORM.keys, ELEMENTS], twice; in NVFP4 their even elements, and their odd ones: FILLED
    elements behind FIRST. Each row begins at a multiple of ALIGNED bytes. The hint is here, because the compiler drops
    hints on a helper's arguments.

    A coded row begins at a word and not at a vector, so its codes are copied by 4 bytes. No load has fewer: the byte of
    a scale comes in its word, which the scales of up to four groups share."""
    at = column.to(tl.int64) * column_stride
    element = tl.arange(0, ELEMENTS)
    own = seen[:, None] & (element < FILLED)[None, :]
    if FORM.code == _RAW:
        row = tl.multiple_of(start + at, [ALIGNED])
        even = tl.load(row[:, None] + ((FIRST + element) * element_stride)[None, :], own, other=0.0)
        odd = even
    else:
        row = tl.multiple_of(start + at * 4, [ALIGNED])
        if FORM.code == _FP8:
            codes = tl.load(row[:, None] + (FIRST + element)[None, :], own, other=0)
            scale = row_scales(byte_at(row, FORM.head_dim, seen))
            even = fp8_values(codes) * scale[:, None]
            odd = even
        else:
            scale = row_scales(byte_at(row, FORM.head_dim // 16 * 9, seen))
            group = tl.arange(0, ELEMENTS // 8)
            own = seen[:, None] & (group < (FILLED + 15) // 16)[None, :]
            byte = (FIRST // 2 + group * 8)[:, None] + tl.arange(0, 8)[None, :]
            codes = tl.load(row[:, None, None] + byte[None, :, :], own[:, :, None], other=0)
            scale_at = FORM.head_dim // 2 + FIRST // 16 + group
            block_scales = byte_at(row[:, None], scale_at[None, :], own)
            even, odd = nvfp4_values(codes, block_scales, scale, FORM.keys, ELEMENTS // 8)
    return even, odd


@triton.jit
def of_values(query, weight, element, FORM: tl.constexpr):
    """The factor of values in place of keys: `query` times the weight of keys, and 0 at elements that turn."""
    still = (element < FORM.head_dim) & (element % (FORM.head_dim // 2) >= FORM.pairs)
    return (query * tl.load(weight + element, still, other=0.0).to(tl.float32)[None, :]).to(query.dtype)


@triton.jit
def with_turned(scores, left_query, right_query, left, right, weight, cos, sin, pair, seen, FORM: tl.constexpr):
    """`scores` and products of the elements that turn, whose keys are made of values. `left`, `right`: the values of
    the first and the second element of each `pair`. `cos`, `sin`: addresses of each column's angles."""
    own = seen[:, None] & (pair < FORM.pairs)[None, :]
    of_cos = tl.load(cos[:, None] + pair[None, :], own, other=0.0)
    of_sin = tl.load(sin[:, None] + pair[None, :], own, other=0.0)
    # By column, although all columns have the same: a row of weights would stay in registers through the loop.
    of_left = weight + tl.broadcast_to(pair[None, :], own.shape)
    left = left.to(tl.float32) * tl.load(of_left, own, other=0.0).to(tl.float32)
    right = right.to(tl.float32) * tl.load(of_left + FORM.head_dim // 2, own, other=0.0).to(tl.float32)
    key = (left * of_cos - right * of_sin).to(left_query.dtype)
    scores = tl.dot(left_query, tl.trans(key), scores, input_precision="ieee")
    key = (right * of_cos + left * of_sin).to(left_query.dtype)
    return tl.dot(right_query, tl.trans(key), scores, input_precision="ieee")
