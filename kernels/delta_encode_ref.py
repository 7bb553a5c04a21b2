"""Rows to packed NVFP4 records of their residuals against centroids: the oracle, in plain torch, and what runs on
the CPU.

Row i of a record becomes s_i · centroid + residual: s_i one BF16 number, the residual in NVFP4. Only the residual is
rounded to four bits, so the error is about 9.5 % of the residual's norm and not of the row's.
"""

from typing import Literal

import torch
from jaxtyping import BFloat16, Float, Float32, Int64, UInt8
from torch import Tensor

from tiered.kernels.nvfp4_encode_ref import encode_chunk
from tiered.kernels.nvfp4_scale import nvfp4_scale, require_finite
from tiered.kernels.record_layout import chunks
from tiered.kernels.record_table import Packed, RecordTable, pack

Base = Literal["projection", "mean"]


def delta_encode(
    rows: Float[Tensor, "n width"],
    table: RecordTable,
    centroids: Float[Tensor, "clusters width"] | None,
    centroid_of_record: Int64[Tensor, " records"] | None,
    out: UInt8[Tensor, " bytes"],
    *,
    base: Base = "projection",
) -> None:
    """Write the records of `table` into `out`; its other bytes stay as they are.

    Args:
        rows: float32 or bfloat16, record after record.
        table: sizes and places of the records.
        centroids: what residuals are taken against, in the dtype in which they are kept for decoding; None for plain
            NVFP4 records (`table.delta` false).
        centroid_of_record: which of them each record has.
        out: contiguous, at a multiple of 16 bytes, on the device of `rows`.
        base: s_i: `"projection"` = <row, c> / <c, c>, or 0 where that is no number (a centroid of zeros); `"mean"` =
            1, for centroids that are the means of their rows. Decoding does not depend on it.

    Raises:
        ValueError: sizes that do not fit; rows that are not finite or whose residuals overflow float32, before anything
            is written. The Triton kernel, which may not wait for the device, instead gives a record with such a value
            a NaN for its scale: all its rows decode to NaN, those of other records are untouched.
    """
    check_rows(rows, table, base)
    table.check(out, centroids, centroid_of_record)
    if table.total == 0:
        return
    record = table.record_of_row
    kept, projections = None, torch.empty(0, dtype=torch.bfloat16, device=rows.device)
    if centroids is not None and centroid_of_record is not None:
        kept = centroids.index_select(0, centroid_of_record)
        projections = _projections(rows, kept, record) if base == "projection" else torch.ones_like(record).bfloat16()

    def residual(part: slice) -> Float32[Tensor, "rows width"]:
        values = rows[part].float()
        if kept is None:
            return values
        # Against the rounded projection, the one that decoding has.
        return values - kept.index_select(0, record[part]).float().mul_(projections[part, None].float())

    most = torch.cat([residual(part).abs().amax(1) for part in chunks(table.total, table.width)])
    require_finite(most, "rows")
    scale = nvfp4_scale(most.new_zeros(len(table.rows)).scatter_reduce_(0, record, most, "amax"))
    row_scale = scale.index_select(0, record)
    encoded = [encode_chunk(residual(part), row_scale[part]) for part in chunks(table.total, table.width)]
    codes, block_scales = (torch.cat(parts) for parts in zip(*encoded, strict=True))
    pack(Packed(codes, scale, projections, block_scales), table, out)


def check_rows(rows: Tensor, table: RecordTable, base: str) -> None:
    """Raise `ValueError` unless `rows` are those of `table` and `base` is known."""
    if rows.shape != (table.total, table.width):
        raise ValueError(f"rows {tuple(rows.shape)} do not fit the table: [{table.total}, {table.width}] is allowed")
    if base not in ("projection", "mean"):
        raise ValueError(f"unknown base {base!r}; allowed: 'projection', 'mean'")


def _projections(
    rows: Float[Tensor, "n width"], centroids: Float[Tensor, "records width"], record: Int64[Tensor, " n"]
) -> BFloat16[Tensor, " n"]:
    """<row, c> / <c, c> with the centroid of the row's record, 0 where that is no number in BF16.

    In float64, where the products are exact: whatever the order of the sum, BF16 gets the same number on every device.
    """
    squares = centroids.double().square_().sum(1).index_select(0, record)
    products = [
        rows[part].double().mul_(centroids.index_select(0, record[part])).sum(1) for part in chunks(*rows.shape)
    ]
    return (torch.cat(products) / squares).float().bfloat16().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
