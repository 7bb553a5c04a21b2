"""Packed NVFP4 records to rows, each beside its centroid: the oracle, in plain torch, and what runs on the CPU."""

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.nvfp4_decode_ref import CHUNK_ROWS, decode_chunk
from tiered.kernels.record_table import RecordTable, record_views


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
    first = 0
    for k, (offset, count) in enumerate(zip(table.offsets, table.rows, strict=True)):
        record = record_views(buffer[offset : offset + table.layout(k).nbytes].to(out.device), table.layout(k))
        centroid = None
        if centroids is not None and centroid_of_record is not None:
            centroid = centroids.index_select(0, centroid_of_record[k : k + 1]).float()
        for start in range(0, count, CHUNK_ROWS):
            part = slice(start, min(start + CHUNK_ROWS, count))
            rows = decode_chunk(record.codes[part], record.block_scales[part], record.scale)[:, : table.width]
            if centroid is not None and record.projections is not None:
                rows += record.projections[part, None].float() * centroid
            written = slice(first + part.start, first + part.stop)
            if out_rows is None:
                out[written] = rows
            else:
                out.index_copy_(0, out_rows[written], rows.to(out.dtype))
        first += count


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
