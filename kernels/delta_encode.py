"""Rows to packed NVFP4 records of their residuals against centroids, in Triton."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.delta_encode_ref import Base, check_rows
from tiered.kernels.nvfp4_bits import bf16_bits, bf16_values, encode_groups, magnitude_bits, record_rows, record_scale
from tiered.kernels.nvfp4_scale import E4M3_MIN
from tiered.kernels.record_layout import GROUP
from tiered.kernels.record_table import RecordTable

BLOCK_ROWS = 4
BLOCK_GROUPS = 64
_LEAST = tl.constexpr(E4M3_MIN)


@triton.jit(do_not_specialize=["total"])
def _measure(
    rows,
    row_stride,
    total,
    starts,
    at,
    record_of_row,
    centroids,
    centroid_stride,
    centroid_of_record,
    out,
    amax,
    PROJECT: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Write the projections, and the largest residual of every record, as bits, to `amax`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < total
    DELTA: tl.constexpr = centroids is not None
    record, _, _, projection_at, _ = record_rows(row, real, starts, at, record_of_row, GROUPS, DELTA)
    x_row = (rows + row * row_stride)[:, None]
    c_row = None
    projection = tl.full((BLOCK_ROWS,), 1.0, tl.float32)
    if DELTA:
        c_row = (centroids + tl.load(centroid_of_record + record, real, other=0) * centroid_stride)[:, None]
        if PROJECT:
            # float64, as in the reference.
            above = tl.zeros((BLOCK_ROWS,), tl.float64)
            below = tl.zeros((BLOCK_ROWS,), tl.float64)
            for begin in range(0, WIDTH, BLOCK_COLUMNS):
                column = (begin + tl.arange(0, BLOCK_COLUMNS))[None, :]
                mask = real[:, None] & (column < WIDTH)
                x = tl.load(x_row + column, mask, other=0).to(tl.float32).to(tl.float64)
                c = tl.load(c_row + column, mask, other=0).to(tl.float32).to(tl.float64)
                above += tl.sum(x * c, axis=1)
                below += tl.sum(c * c, axis=1)
            projection = (above / below).to(tl.float32)
        bits = bf16_bits(projection)
        tl.store((out + projection_at).to(tl.pointer_type(tl.uint16)), bits, real)
        projection = bf16_values(bits)
    largest = tl.zeros((BLOCK_ROWS,), tl.int32)
    for begin in range(0, WIDTH, BLOCK_COLUMNS):
        column = (begin + tl.arange(0, BLOCK_COLUMNS))[None, :]
        mask = real[:, None] & (column < WIDTH)
        residual = tl.load(x_row + column, mask, other=0).to(tl.float32)
        if DELTA:
            residual -= projection[:, None] * tl.load(c_row + column, mask, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(magnitude_bits(residual), axis=1))
    tl.atomic_max(amax + record, largest, real, sem="relaxed")


@triton.jit(do_not_specialize=["total"])
def _encode(
    rows,
    row_stride,
    total,
    starts,
    at,
    record_of_row,
    centroids,
    centroid_stride,
    centroid_of_record,
    out,
    amax,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Write codes, block scales and record scales."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    real = row < total
    inside = real[:, None] & (group < GROUPS)[None, :]
    column = (group[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :]
    mask = real[:, None, None] & (column < WIDTH)
    DELTA: tl.constexpr = centroids is not None
    record, codes_at, scale_at, projection_at, block_scales_at = record_rows(
        row, real, starts, at, record_of_row, GROUPS, DELTA
    )
    residual = tl.load((rows + row * row_stride)[:, None, None] + column, mask, other=0).to(tl.float32)
    if DELTA:
        c_row = centroids + tl.load(centroid_of_record + record, real, other=0) * centroid_stride
        centroid = tl.load(c_row[:, None, None] + column, mask, other=0).to(tl.float32)
        projection = tl.load((out + projection_at).to(tl.pointer_type(tl.uint16)), real, other=0)
        residual -= bf16_values(projection)[:, None, None] * centroid
    scale = record_scale(tl.load(amax + record, real, other=0))
    codes, block_scales = encode_groups(residual, scale, _LEAST, BLOCK_ROWS, BLOCK_GROUPS)
    byte = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + codes_at[:, None, None] + byte[None, :, :], codes, inside[:, :, None])
    tl.store(out + block_scales_at[:, None] + group[None, :], block_scales, inside)
    first = real & (row == tl.load(starts + record, real, other=0)) & (tl.program_id(1) == 0)
    tl.store((out + scale_at).to(tl.pointer_type(tl.float32)), scale, first)


def delta_encode(
    rows: Float[Tensor, "n width"],
    table: RecordTable,
    centroids: Float[Tensor, "clusters width"] | None,
    centroid_of_record: Int64[Tensor, " records"] | None,
    out: UInt8[Tensor, " bytes"],
    *,
    base: Base = "projection",
) -> None:
    """As in delta_encode_ref.py, but that rows which are not finite raise nothing: their records decode to NaN."""
    check_rows(rows, table, base)
    table.check(out, centroids, centroid_of_record)
    if table.total == 0:
        return
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if centroids is not None:
        centroids = centroids if centroids.stride(1) == 1 else centroids.contiguous()
    groups = -(-table.width // GROUP)
    block_groups = min(BLOCK_GROUPS, triton.next_power_of_2(groups))
    amax = torch.zeros(len(table.rows), dtype=torch.int32, device=rows.device)
    arguments = (
        rows,
        rows.stride(0),
        table.total,
        table.starts,
        table.at,
        table.record_of_row,
        centroids,
        0 if centroids is None else centroids.stride(0),
        centroid_of_record,
        out,
        amax,
    )
    sizes = {"WIDTH": table.width, "GROUPS": groups, "BLOCK_ROWS": BLOCK_ROWS}
    tiles = triton.cdiv(table.total, BLOCK_ROWS)
    with torch.cuda.device_of(rows):
        _measure[tiles,](
            *arguments,
            PROJECT=base == "projection",
            **sizes,
            BLOCK_COLUMNS=GROUP * block_groups,
            enable_fp_fusion=False,
        )
        _encode[tiles, triton.cdiv(groups, block_groups)](
            *arguments, **sizes, BLOCK_GROUPS=block_groups, enable_fp_fusion=False
        )
