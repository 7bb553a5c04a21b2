"""Rows to packed NVFP4 records of their residuals against centroids: the oracle, in plain torch.

Row i of a record becomes s_i · centroid + residual: s_i one BF16 number, the residual in NVFP4. Only the residual is
rounded to four bits, so the error is about 9.5 % of the residual's norm and not of the row's.
"""

from typing import Literal

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from tiered.kernels.nvfp4_encode_ref import nvfp4_encode
from tiered.kernels.nvfp4_scale import nvfp4_scale, require_finite
from tiered.kernels.record_table import RecordTable, record_views

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
        ValueError: rows that are not finite, before anything is written; a residual that overflows float32; sizes that
            do not fit. The Triton kernel, which may not wait for the device, instead gives a record with such a value
            a NaN for its scale: all its rows decode to NaN, those of other records are untouched.
    """
    check_rows(rows, table, base)
    table.check(out, centroids, centroid_of_record)
    require_finite(rows, "rows")
    first = 0
    for k, (offset, count) in enumerate(zip(table.offsets, table.rows, strict=True)):
        values = rows[first : first + count].float()
        first += count
        record = record_views(out[offset : offset + table.layout(k).nbytes], table.layout(k))
        if centroids is not None and centroid_of_record is not None and record.projections is not None:
            centroid = centroids.index_select(0, centroid_of_record[k : k + 1])[0].float()
            record.projections.copy_(_projections(values, centroid) if base == "projection" else torch.ones(count))
            # Against the rounded projection, the one that decoding has.
            values = values - record.projections.float()[:, None] * centroid
        low, high = torch.aminmax(values)
        record.scale.copy_(nvfp4_scale(torch.maximum(-low, high)))
        codes, block_scales = nvfp4_encode(values, record.scale.expand(count))
        record.codes.copy_(codes)
        record.block_scales.copy_(block_scales)


def check_rows(rows: Tensor, table: RecordTable, base: str) -> None:
    """Raise `ValueError` unless `rows` are those of `table` and `base` is known."""
    if rows.shape != (table.total, table.width):
        raise ValueError(f"rows {tuple(rows.shape)} do not fit the table: [{table.total}, {table.width}] is allowed")
    if base not in ("projection", "mean"):
        raise ValueError(f"unknown base {base!r}; allowed: 'projection', 'mean'")


def _projections(rows: Float32[Tensor, "n width"], centroid: Float32[Tensor, " width"]) -> Float32[Tensor, " n"]:
    """<row, c> / <c, c>, 0 where its BF16 would be no number.

    In float64, where the products are exact: whatever the order of the sum, BF16 gets the same number on every device.
    """
    wide = centroid.double()
    projections = (rows.double() @ wide / wide.dot(wide)).float()
    return projections.where(projections.bfloat16().isfinite(), 0.0)
