"""Rows to the bytes of records and back, in every codec: one row of `CODECS` adds one.

A record's bytes depend on its rows and its centroid alone, and the rows that come back on its bytes and its centroid
alone: where the bytes lay in between makes no difference to a single bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.delta_decode_ref import delta_decode
from tiered.kernels.delta_encode_ref import delta_encode
from tiered.kernels.host_values import on_device
from tiered.kernels.record_table import RecordTable
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
            _put(out, places, part, rows)


class Fp8Codec:
    """E4M3 with a scale for each row, as in `tiered.kernels.coded_rows`."""

    def encode(self, rows, sizes, out, offsets, centroids, clusters) -> None:
        coded = CodedRows.of(rows, RowCode.FP8).bytes
        for part, offset, _ in _parts(offsets, sizes):
            out[offset : offset + coded[part].numel()].copy_(coded[part].flatten())

    def decode(self, buffer, offsets, sizes, dtype, out, places, centroids) -> None:
        row_bytes = RowCode.FP8.row_bytes(out.shape[1])
        for part, offset, size in _parts(offsets, sizes):
            coded = buffer[offset : offset + size * row_bytes].view(size, row_bytes)
            _put(out, places, part, CodedRows(coded, RowCode.FP8, out.shape[1], out.dtype).values())


@dataclass(frozen=True, slots=True)
class Nvfp4Codec:
    """NVFP4 of the rows; or, with `delta`, of their residuals against what `base` makes of their centroid."""

    delta: bool
    base: Literal["projection", "mean"] = "projection"

    def encode(self, rows, sizes, out, offsets, centroids, clusters) -> None:
        table = RecordTable.build(sizes, offsets, width=rows.shape[1], delta=self.delta, device=rows.device)
        chosen = None if clusters is None else on_device(clusters, rows.device)
        for_device(delta_encode, rows.device)(rows, table, centroids, chosen, out, base=self.base)

    def decode(self, buffer, offsets, sizes, dtype, out, places, centroids) -> None:
        table = RecordTable.build(sizes, offsets, width=out.shape[1], delta=self.delta, device=out.device)
        chosen = torch.arange(len(sizes), device=out.device) if self.delta else None
        for_device(delta_decode, out.device)(buffer, table, centroids, chosen, out, places)


CODECS: Mapping[Codec, RowCodec] = {
    Codec.RAW: RawCodec(),
    Codec.FP8: Fp8Codec(),
    Codec.NVFP4: Nvfp4Codec(delta=False),
    Codec.NVFP4_DELTA: Nvfp4Codec(delta=True),
}


def _parts(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
    """For each record: its rows among all, its first byte, and how many rows it has."""
    first = 0
    for offset, size in zip(offsets, sizes, strict=True):
        yield slice(first, first + size), offset, size
        first += size


def _put(out: Tensor, places: Tensor | None, part: slice, rows: Tensor) -> None:
    if places is None:
        out[part] = rows
    else:
        out.index_copy_(0, places[part], rows.to(out.dtype))
