"""Heads of queries or keys rotated in Triton, and normed before: each row looks up its angles in the tables of all
columns."""

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from tiered.kernels.coded_rows import Heads
from tiered.kernels.launch import launch, row_tile
from tiered.kernels.rotate_ref import HeadNorms, Tables, check_rotation

TILE_PAIRS = 512  # pairs of elements that a program rotates


# Arguments that vary between calls are not specialised: Triton would recompile for 1 and for multiples of 16.
@triton.jit(
    do_not_specialize=["table_batch", "column_batch", "rows", "length", "first_heads"],
    do_not_specialize_on_alignment=["columns"],
)
def _rotate(
    heads, cos, sin, columns, queries_weight, keys_weight, rotated,
    heads_batch, heads_head, heads_row,
    table_batch, table_row, column_batch, column_row, rows, length, first_heads, eps,
    HALF: tl.constexpr, SCATTERED: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    there = row < rows
    row = row.to(tl.int64)
    column = row
    if SCATTERED:
        column = tl.load(columns + batch * column_batch + row * column_row, there, other=0).to(tl.int64)
    pair = tl.arange(0, TILE.elements)[None, :]
    inside = there[:, None] & (pair < HALF)
    # A column out of range is a caller's error, but the kernel must not read outside the tables.
    known = inside & ((column >= 0) & (column < length))[:, None]
    angle_at = (batch * table_batch + column * table_row)[:, None] + pair
    cosine = tl.load(cos + angle_at, known, other=0.0)
    sine = tl.load(sin + angle_at, known, other=0.0)
    left_at = (batch * heads_batch + head * heads_head + row * heads_row)[:, None] + pair
    left = tl.load(heads + left_at, inside, other=0.0).to(tl.float32)
    right = tl.load(heads + left_at + HALF, inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = rotated.dtype.element_ty
    if queries_weight is not None:
        weight = queries_weight
        if head >= first_heads:
            weight = keys_weight
        left_scale = tl.load(weight + pair, pair < HALF, other=0.0).to(tl.float32)
        right_scale = tl.load(weight + HALF + pair, pair < HALF, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(left * left + right * right, 1) / (2 * HALF) + eps)[:, None]
        left, right = left * factor, right * factor
        if OFFSET is None:
            left, right = left.to(dtype).to(tl.float32) * left_scale, right.to(dtype).to(tl.float32) * right_scale
        else:
            left, right = left * (OFFSET + left_scale), right * (OFFSET + right_scale)
        left, right = left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)
    out_at = (((batch * tl.num_programs(1) + head) * rows + row) * (2 * HALF))[:, None] + pair
    tl.store(rotated + out_at, (left * cosine - right * sine).to(dtype), inside)
    tl.store(rotated + out_at + HALF, (right * cosine + left * sine).to(dtype), inside)


def rotate(
    heads: Heads,
    cos: Tables,
    sin: Tables,
    columns: Int[Tensor, "batch rows"] | None = None,
    norms: HeadNorms | None = None,
) -> Heads:
    """As in rotate_ref.py, without norms to the bit; the result is contiguous."""
    check_rotation(heads, cos, sin, columns, norms)
    batch, count, rows, _ = heads.shape
    heads = heads if heads.stride(3) == 1 else heads.contiguous()
    if cos.stride(3) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
    if rotated.numel() == 0:
        return rotated
    tables, _, length, half = cos.shape
    tile = row_tile(half, TILE_PAIRS)
    # If rows are all columns the kernel reads no column numbers, so any pointer serves.
    numbers = cos if columns is None else columns
    weights = (None, None) if norms is None else (norms.queries.contiguous(), norms.keys.contiguous())
    of_norms = (0, 0.0) if norms is None else (norms.count, norms.eps)
    of_tables = cos.stride(0) if tables > 1 else 0, cos.stride(2)
    strides = *heads.stride()[:3], *of_tables, *numbers.stride()[:2]
    arguments = heads, cos, sin, numbers, *weights, rotated, *strides, rows, length, *of_norms
    # Without fusion, product and sum are rounded separately, as in torch.
    options = {"HALF": half, "SCATTERED": columns is not None, "OFFSET": norms and norms.offset, "TILE": tile}
    options["enable_fp_fusion"] = False
    launch(_rotate, (-(-rows // tile.rows), count, batch), *arguments, **options, on=heads)
    return rotated
