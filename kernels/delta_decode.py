"""Packed NVFP4 records to rows, each beside its centroid, in one Triton kernel."""

import triton
import triton.language as tl
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.delta_decode_ref import check_out
from tiered.kernels.launch import launch
from tiered.kernels.nvfp4_bits import bf16_values, decode_groups, record_rows
from tiered.kernels.record_layout import GROUP
from tiered.kernels.record_table import RecordTable

BLOCK_ROWS = 4
BLOCK_GROUPS = 64


# What varies from call to call compiles nothing: Triton would tell 1 and multiples of 16 from other counts.
@triton.jit(do_not_specialize=["total", "out_size"], do_not_specialize_on_alignment=["out_rows"])
def _decode(
    buffer,
    total,
    starts,
    at,
    record_of_row,
    centroids,
    centroid_stride,
    centroid_of_record,
    out,
    out_stride,
    out_size,
    out_rows,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    real = row < total
    inside = real[:, None] & (group < GROUPS)[None, :]
    DELTA: tl.constexpr = centroids is not None
    record, codes_at, scale_at, projection_at, block_scales_at = record_rows(
        row, real, starts, at, record_of_row, GROUPS, DELTA
    )
    byte = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    codes = tl.load(buffer + codes_at[:, None, None] + byte[None, :, :], inside[:, :, None], other=0)
    block_scales = tl.load(buffer + block_scales_at[:, None] + group[None, :], inside, other=0)
    scale = tl.load((buffer + scale_at).to(tl.pointer_type(tl.float32)), real, other=1)
    values = decode_groups(codes, block_scales, scale)
    column = (group[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :]
    mask = real[:, None, None] & (column < WIDTH)
    if DELTA:
        c_row = centroids + tl.load(centroid_of_record + record, real, other=0) * centroid_stride
        centroid = tl.load(c_row[:, None, None] + column, mask, other=0).to(tl.float32)
        projection = bf16_values(tl.load((buffer + projection_at).to(tl.pointer_type(tl.uint16)), real, other=0))
        values += projection[:, None, None] * centroid
    target = row
    if out_rows is not None:
        target = tl.load(out_rows + row, real, other=0)
        # A row out of range is the caller's mistake; it must not reach memory beside `out`.
        mask &= ((target >= 0) & (target < out_size))[:, None, None]
    tl.store(out + (target * out_stride)[:, None, None] + column, values.to(out.dtype.element_ty), mask)


def delta_decode(
    buffer: UInt8[Tensor, " bytes"],
    table: RecordTable,
    centroids: Float[Tensor, "clusters width"] | None,
    centroid_of_record: Int64[Tensor, " records"] | None,
    out: Float[Tensor, "out_rows width"],
    out_rows: Int64[Tensor, " n"] | None = None,
) -> None:
    """As in delta_decode_ref.py. Triton takes a pinned host tensor for `buffer` like one of the device, by the address
    under which the device sees it, and raises ValueError for pageable memory."""
    table.check(buffer, centroids, centroid_of_record)
    check_out(table, out, out_rows)
    if table.total == 0:
        return
    if centroids is not None:
        centroids = centroids if centroids.stride(1) == 1 else centroids.contiguous()
    groups = -(-table.width // GROUP)
    block_groups = min(BLOCK_GROUPS, triton.next_power_of_2(groups))
    launch(
        _decode,
        (triton.cdiv(table.total, BLOCK_ROWS), triton.cdiv(groups, block_groups)),
        buffer,
        table.total,
        table.starts,
        table.at,
        table.record_of_row,
        centroids,
        0 if centroids is None else centroids.stride(0),
        centroid_of_record,
        out,
        out.stride(0),
        out.shape[0],
        out_rows,
        WIDTH=table.width,
        GROUPS=groups,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_GROUPS=block_groups,
        enable_fp_fusion=False,
        on=out,
    )
