"""Rows to the bytes of records and back, in every codec: one row of `CODECS` adds one.

A row's bytes depend on the row and its centroid alone, and the row that comes back on its bytes and its centroid alone:
where the bytes lay in between makes no difference to a single bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.decode_rows_ref import decode_rows
from tiered.kernels.encode_rows_ref import encode_rows
from tiered.kernels.host_values import on_device
from tiered.kernels.record_table import RecordTable
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import RowCode
from tiered.offload.codec_bytes import Codec


@runtime_checkable
class RowCodec(Protocol):
    """How rows become bytes. Records lie at `offsets`, multiples of 128 bytes, of one buffer; `sizes` are their rows,
    which stand record after record in the tensor beside it."""

    def encode(
        self,
        rows: Float[Tensor, "n width"],
        sizes: Sequence[int],
        out: UInt8[Tensor, " bytes"],
        offsets: Sequence[int],
        centroids: Float[Tensor, "clusters width"] | None,
        clusters: Sequence[int] | None,
    ) -> None:
        """Write the records of `rows` into `out`; `clusters` says which of `centroids` each is a delta against."""
        ...

    def decode(
        self,
        buffer: UInt8[Tensor, " bytes"],
        offsets: Sequence[int],
        sizes: Sequence[int],
        dtype: torch.dtype,
        out: Float[Tensor, "any width"],
        places: Int64[Tensor, " n"] | None,
        centroids: Float[Tensor, "records width"] | None,
    ) -> None:
        """Write the rows to `out[places]`, or to its first n where `places` is None. `dtype`: of the rows that were
        encoded. `centroids`: one for each record."""
        ...


class RawCodec:
    """The rows as they are."""

    def encode(self, rows, sizes, out, offsets, centroids, clusters) -> None:
        for part, offset, _ in _parts(offsets, sizes):
            values = rows[part]
            out[offset : offset + values.nbytes].view(rows.dtype).view_as(values).copy_(values)

    def decode(self, buffer, offsets, sizes, dtype, out, places, centroids) -> None:
        row_bytes = out.shape[1] * dtype.itemsize
        for part, offset, size in _parts(offsets, sizes):
            rows = buffer[offset : offset + size * row_bytes].view(dtype).view(size, -1)
            if places is None:
                out[part] = rows
            else:
                out.index_copy_(0, places[part], rows.to(out.dtype))


@dataclass(frozen=True, slots=True)
class RowsInCode:
    """Rows in `code`; with `delta`, their residuals against their centroid."""

    code: RowCode
    delta: bool = False

    def encode(self, rows, sizes, out, offsets, centroids, clusters) -> None:
        table = self._table(sizes, offsets, rows.shape[1], rows.device)
        of_record = None if clusters is None else on_device(clusters, rows.device)
        for_device(encode_rows, rows.device)(rows, self.code, out, table, self._base(table, centroids, of_record))

    def decode(self, buffer, offsets, sizes, dtype, out, places, centroids) -> None:
        table = self._table(sizes, offsets, out.shape[1], out.device)
        base = self._base(table, centroids, None)
        for_device(decode_rows, out.device)(buffer, self.code, out, table, places, base)

    def _table(self, sizes: Sequence[int], offsets: Sequence[int], width: int, device: torch.device) -> RecordTable:
        row_bytes = self.code.row_bytes(width, residual=self.delta)
        return RecordTable.build(sizes, offsets, row_bytes=row_bytes, device=device)

    def _base(self, table: RecordTable, centroids: Tensor | None, of_record: Tensor | None) -> RowBase | None:
        if centroids is None or not self.delta:
            return None
        records = table.record_of_row
        return RowBase(centroids, records if of_record is None else of_record.index_select(0, records))


CODECS: Mapping[Codec, RowCodec] = {
    Codec.RAW: RawCodec(),
    Codec.FP8: RowsInCode(RowCode.FP8),
    Codec.NVFP4: RowsInCode(RowCode.NVFP4),
    Codec.NVFP4_DELTA: RowsInCode(RowCode.NVFP4, delta=True),
}


def _parts(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
    """For each record: its rows among all, its first byte, and how many rows it has."""
    first = 0
    for offset, size in zip(offsets, sizes, strict=True):
        yield slice(first, first + size), offset, size
        first += size
