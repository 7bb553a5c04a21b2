"""Rows to the bytes of records and back, in every codec: one row of `CODECS` adds one.

A record's bytes depend on its rows and its centroid alone, and the rows that come back on its bytes and its centroid
alone: where the bytes lay in between makes no difference to a single bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int32, Int64, UInt8
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.delta_decode_ref import delta_decode
from tiered.kernels.delta_encode_ref import delta_encode
from tiered.kernels.host_values import on_device
from tiered.kernels.nvfp4_decode_ref import decode_chunk
from tiered.kernels.nvfp4_encode_ref import encode_chunk
from tiered.kernels.nvfp4_scale import E2M1_MAX, E4M3_MAX, E4M3_NORMAL
from tiered.kernels.record_layout import CODE_BYTES, GROUP
from tiered.kernels.record_table import RecordTable
from tiered.offload.codec_bytes import ROW_SCALE_BYTES, Codec

CODE_BYTES_AND_SCALE = CODE_BYTES + 1  # of a group of columns
_BIAS, _LEAST = 127, -126  # of the exponents of scales, which are float32's: the least is that of its normal numbers
_LEAST_OF_TWO = -116


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


@dataclass(frozen=True, slots=True)
class RowScaledCodec:
    """Codes of a few bits, and for each row a scale that is a power of two (E8M0), in front of the codes. What comes
    back is exact in every dtype that models have, and makes the same bytes again: rows may go through it any number of
    times.

    Attributes:
        code: codes of float32 rows, in whole bytes, and the exponents of their scales.
        value: float32 rows of codes, and of what pads them.
        row_bytes: of the codes of a row of some elements.
    """

    code: Callable[[Float32[Tensor, "n width"]], tuple[UInt8[Tensor, "n row_bytes"], Int32[Tensor, "n 1"]]]
    value: Callable[[UInt8[Tensor, "n row_bytes"], Int32[Tensor, "n 1"]], Float32[Tensor, "n padded_width"]]
    row_bytes: Callable[[int], int]

    def encode(self, rows, sizes, out, offsets, centroids, clusters) -> None:
        for part, offset, size in _parts(offsets, sizes):
            codes, exponents = self.code(rows[part].float())
            body = offset + size * ROW_SCALE_BYTES
            out[offset:body].copy_((exponents.flatten() + _BIAS).to(torch.uint8))
            out[body : body + codes.numel()].copy_(codes.flatten())

    def decode(self, buffer, offsets, sizes, dtype, out, places, centroids) -> None:
        row_bytes = self.row_bytes(out.shape[1])
        for part, offset, size in _parts(offsets, sizes):
            body = offset + size * ROW_SCALE_BYTES
            exponents = buffer[offset:body].int()[:, None] - _BIAS
            codes = buffer[body : body + size * row_bytes].view(size, row_bytes)
            _put(out, places, part, self.value(codes, exponents)[:, : out.shape[1]])

    def rounded(self, rows: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """`rows` as they come back."""
        flat = rows.reshape(-1, rows.shape[-1])
        return self.value(*self.code(flat.float()))[:, : rows.shape[-1]].to(rows.dtype).view(rows.shape)


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


def _fp8(values: Float32[Tensor, "n width"]) -> tuple[UInt8[Tensor, "n width"], Int32[Tensor, "n 1"]]:
    """E4M3. The largest of a row is rounded first, so that a scale is the same for rounded rows: it is the least that
    brings it to 448 or below, which is 14/16 of 2⁹."""
    sixteenths, exponent = _rounded_most(values)
    exponents = (exponent - 9 + (sixteenths > 14).int()).clamp_min(_LEAST)
    # What is above the largest number would be rounded to it, or to none: that differs by version.
    scaled = torch.ldexp(values, -exponents).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), exponents


def _fp8_values(codes: UInt8[Tensor, "n width"], exponents: Int32[Tensor, "n 1"]) -> Float32[Tensor, "n width"]:
    return torch.ldexp(codes.view(torch.float8_e4m3fn).float(), exponents)


def _nvfp4(values: Float32[Tensor, "n width"]) -> tuple[UInt8[Tensor, "n row_bytes"], Int32[Tensor, "n 1"]]:
    """E2M1 with an E4M3 scale for 16 columns, all of them normal numbers: the largest of a row is 128 to 256. Codes
    first, then block scales."""
    sixteenths, exponent = _rounded_most(values / torch.full((), E2M1_MAX, device=values.device))
    # Below, 1 over the product of both scales would overflow.
    exponents = (exponent - 8 + (sixteenths == 16).int()).clamp_min(_LEAST_OF_TWO)
    scale = torch.ldexp(torch.ones_like(values[:, :1]), exponents)
    return torch.cat(encode_chunk(values, scale.squeeze(1), least=E4M3_NORMAL), dim=1), exponents


def _nvfp4_values(codes: UInt8[Tensor, "n row_bytes"], exponents: Int32[Tensor, "n 1"]) -> Float32[Tensor, "n _"]:
    groups = codes.shape[1] // CODE_BYTES_AND_SCALE
    scale = torch.ldexp(torch.ones(len(codes), device=codes.device), exponents.squeeze(1))
    return decode_chunk(codes[:, : groups * CODE_BYTES], codes[:, groups * CODE_BYTES :], scale)


def _rounded_most(values: Float32[Tensor, "n width"]) -> tuple[Float32[Tensor, "n 1"], Int32[Tensor, "n 1"]]:
    """The largest magnitude of each row, rounded to four bits: sixteenths of a power of two, 8 to 16, and which."""
    mantissa, exponent = values.abs().amax(dim=1, keepdim=True).frexp()
    return (16 * mantissa).round(), exponent


CODECS: Mapping[Codec, RowCodec] = {
    Codec.RAW: RawCodec(),
    Codec.FP8: RowScaledCodec(_fp8, _fp8_values, lambda width: width),
    Codec.NVFP4_ROW: RowScaledCodec(_nvfp4, _nvfp4_values, lambda width: CODE_BYTES_AND_SCALE * -(-width // GROUP)),
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
