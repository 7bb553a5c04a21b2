"""Packed NVFP4 records to rows, each beside its centroid: the oracle, in plain torch, and what runs on the CPU."""

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.nvfp4_decode_ref import decode_chunk
from tiered.kernels.record_layout import chunks
from tiered.kernels.record_table import Packed, RecordTable, unpack


def delta_decode(
    buffer: UInt8[Tensor, " bytes"],
    table: RecordTable,
    centroids: Float[Tensor, "clusters width"] | None,
    centroid_of_record: Int64[Tensor, " records"] | None,
    out: Float[Tensor, "out_rows width"],
    out_rows: Int64[Tensor, " n"] | None = None,
) -> None:
    """Write s_i · centroid + residual of every row i of `table` to `out[out_rows[i]]`; other rows stay as they are.

    The same bytes give the same rows, bit for bit, on every device and from whatever memory they are read: both
    products and the sum are rounded to float32, the sum then to the dtype of `out`.

    Args:
        buffer: contiguous, at a multiple of 16 bytes; on the device of `out`, or in pinned host memory, which the
            Triton kernel reads over the bus.
        table: sizes and places of the records.
        centroids: those that the records were made with; None for plain NVFP4 records (`table.delta` false).
        centroid_of_record: which of them each record has.
        out: rows contiguous.
        out_rows: distinct rows of `out`; None: its first n, in order.

    Raises:
        ValueError: sizes that do not fit.
    """
    table.check(buffer, centroids, centroid_of_record)
    check_out(table, out, out_rows)
    if table.total == 0:
        return
    packed, record = unpack(table, buffer), table.record_of_row
    packed = Packed(*(part.to(out.device) for part in packed))
    scale, kept = packed.scale.index_select(0, record), None
    if centroids is not None and centroid_of_record is not None:
        kept = centroids.index_select(0, centroid_of_record)
    for part in chunks(table.total, table.width):
        rows = decode_chunk(packed.codes[part], packed.block_scales[part], scale[part])[:, : table.width]
        if kept is not None:
            rows += kept.index_select(0, record[part]).float().mul_(packed.projections[part, None].float())
        if out_rows is None:
            out[part] = rows
        else:
            out.index_copy_(0, out_rows[part], rows.to(out.dtype))


def check_out(table: RecordTable, out: Tensor, out_rows: Tensor | None) -> None:
    """Raise `ValueError` unless the rows of `table` fit `out` and `out_rows`."""
    if out.dim() != 2 or out.shape[1] != table.width or out.stride(1) != 1:
        raise ValueError(
            f"out {tuple(out.shape)}, strides {out.stride()}, does not fit: [any, {table.width}] with contiguous rows "
            "is allowed"
        )
    if out_rows is None and out.shape[0] < table.total:
        raise ValueError(f"out has {out.shape[0]} rows for {table.total}; as many or more are allowed")
    if out_rows is not None and (out_rows.dtype != torch.int64 or out_rows.shape != (table.total,)):
        raise ValueError(
            f"out_rows is {out_rows.dtype} {tuple(out_rows.shape)}; torch.int64 ({table.total},) is allowed"
        )
