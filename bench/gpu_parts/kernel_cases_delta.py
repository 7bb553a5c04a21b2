"""Cases of packed delta records, both ways. Their bytes are the law."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, random_bytes, shuffled, size
from gpu_parts.kernel_cases_copies import scattered
from tiered.kernels import delta_decode_ref, delta_encode_ref
from tiered.kernels.delta_encode_ref import Base
from tiered.kernels.record_layout import Nvfp4Layout
from tiered.kernels.record_table import RecordTable

_NVFP4_ERROR = 0.15  # of the norm of normal numbers: 0.095, and room for a handful of them
_NOISE, _ALONG = 0.25, 1.25  # of rows: what is beside their centroid, and their projection on it
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SPARE = 7  # rows of an output that no record has


@dataclass(frozen=True, slots=True)
class Records:
    """Some records in a buffer, with gaps and not in the order of their rows.

    Attributes:
        buffer: records for decoding, or what stands where they are written.
        rows: for encoding, or what stands where they are written.
        places: of the decoded rows there; None: the first.
    """

    table: RecordTable
    centroids: Tensor | None
    centroid_of_record: Tensor | None
    buffer: Tensor
    rows: Tensor
    places: Tensor | None = None

    @property
    def by_host(self) -> tuple[RecordTable, Tensor | None, Tensor | None]:
        """Table, centroids and their choice, for the reference on the CPU."""
        table = self.table
        there = RecordTable.build(table.rows, table.offsets, width=table.width, delta=table.delta, device="cpu")
        if self.centroids is None or self.centroid_of_record is None:
            return there, None, None
        return there, self.centroids.cpu(), self.centroid_of_record.cpu()

    def rows64(self, buffer: Tensor) -> Tensor:
        """The rows in `buffer`, in float64."""
        return rows64(buffer, self.table, self.centroids, self.centroid_of_record)

    @property
    def nbytes(self) -> int:
        """What either way must move beside the rows: records, table, and the centroids that are chosen, once each."""
        chosen = 0
        if self.centroids is not None and self.centroid_of_record is not None:
            chosen = len(self.centroid_of_record.unique()) * size(self.centroids[0])
        tables = size(self.table.starts, self.table.at, self.table.record_of_row, self.centroid_of_record)
        return sum(self.table.layout(k).nbytes for k in range(len(self.table.rows))) + tables + chosen


@dataclass(frozen=True, kw_only=True)
class RecordCase(KernelCase):
    """`counts`: rows of each record. `pinned`: the records lie in host memory that the device can read."""

    counts: tuple[int, ...]
    width: int = 4096
    delta: bool = True
    pinned: bool = False

    def tiny(self) -> Self:
        return replace(self, counts=(3, 1, 2), width=32 + self.width % 16)

    def records(self, generator: torch.Generator, rows: Tensor) -> Records:
        """With random bytes for a buffer."""
        layouts = [Nvfp4Layout(count, self.width, self.delta) for count in self.counts]
        rooms = [-(-layout.nbytes // 128) * 128 + 128 * (k % 2) for k, layout in enumerate(layouts)]
        offsets = scattered(generator, rooms, first=128)
        table = RecordTable.build(self.counts, offsets, width=self.width, delta=self.delta, device=generator.device)
        buffer = random_bytes(generator, 128 + sum(rooms))
        centroids = chosen = None
        if self.delta:
            centroids = normal(generator, len(self.counts) + 1, self.width, dtype=self.dtype)
            chosen = shuffled(generator, len(self.counts) + 1)[: len(self.counts)]
        return Records(table, centroids, chosen, buffer, rows)


class _RecordViews(NamedTuple):
    """The parts of one record."""

    scale: Tensor
    projections: Tensor | None
    block_scales: Tensor


def _record_views(record: Tensor, layout: Nvfp4Layout) -> _RecordViews:
    """The parts of `record` beside its codes; it begins at a multiple of 4 bytes of its storage."""
    return _RecordViews(
        record[layout.record_scale : layout.projections].view(torch.float32),
        record[layout.projections : layout.block_scales].view(torch.bfloat16) if layout.delta else None,
        record[layout.block_scales : layout.nbytes].view(layout.rows, -1),
    )


@dataclass(frozen=True, kw_only=True)
class DeltaDecode(RecordCase):
    """Every code there is, block scales of all sizes. `placed`: rows go to places, in rows that lie apart."""

    kernel, into, roundings = "delta_decode", "rows", 2  # Triton's interpreter does not round bfloat16 to nearest
    placed: bool = True

    def draw(self, generator: torch.Generator) -> Records:
        total = sum(self.counts)
        standing = normal(generator, total + _SPARE, self.width + (16 if self.placed else 0), dtype=self.dtype)
        given = self.records(generator, standing)
        places = shuffled(generator, total + _SPARE)[:total] if self.placed else None
        for k, offset in enumerate(given.table.offsets):
            layout = given.table.layout(k)
            record = _record_views(given.buffer[offset : offset + layout.nbytes], layout)
            record.scale.copy_(normal(generator, 1).abs_().add_(0.1))
            record.block_scales.copy_(random_bytes(generator, *record.block_scales.shape, below=127))
            if record.projections is not None:
                record.projections.copy_(normal(generator, layout.rows))
        pinned = self.pinned and generator.device.type == "cuda"
        return replace(given, places=places, buffer=given.buffer.cpu().pin_memory() if pinned else given.buffer)

    def run(self, given: Records, room: Sequence[Tensor]) -> Sequence[Tensor]:
        out = room[0][:, : self.width]
        op(self.kernel)(given.buffer, given.table, given.centroids, given.centroid_of_record, out, given.places)
        return room

    def truth(self, given: Records) -> Sequence[Tensor]:
        return (_put(given, given.rows64(given.buffer.to(given.rows.device)), given.rows.double()),)

    def law(self, given: Records) -> Sequence[Tensor]:
        table, centroids, chosen = given.by_host
        rows = torch.empty(table.total, table.width)
        delta_decode_ref.delta_decode(given.buffer.cpu(), table, centroids, chosen, rows)
        if self.dtype == torch.bfloat16 and given.rows.device.type == "cpu":
            # Triton's interpreter does not round to it, but cuts off.
            rows = (rows.view(torch.int32) & -0x10000).view(torch.float32)
        return (_put(given, rows.to(self.dtype), given.rows.cpu().clone()),)

    def moved(self, given: Records) -> int:
        return given.nbytes + size(given.places) + given.table.total * self.width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class DeltaEncode(RecordCase):
    """Rows near their centroids, which lie apart in memory."""

    kernel, into = "delta_encode", "buffer"
    base: Base = "projection"

    @property
    def bound(self) -> float:
        if not self.delta:
            return _NVFP4_ERROR
        residual = _NOISE if self.base == "projection" else math.hypot(_NOISE, _ALONG - 1)
        return _NVFP4_ERROR * residual / math.hypot(_NOISE, _ALONG)

    def draw(self, generator: torch.Generator) -> Records:
        rows = normal(generator, sum(self.counts), self.width + 16, dtype=self.dtype)[:, 8 : 8 + self.width]
        given = self.records(generator, rows)
        if given.centroids is not None:
            of_record = given.centroids[given.centroid_of_record]
            rows.mul_(_NOISE).add_(of_record[given.table.record_of_row], alpha=_ALONG)
        return given

    def run(self, given: Records, room: Sequence[Tensor]) -> Sequence[Tensor]:
        op(self.kernel)(given.rows, given.table, given.centroids, given.centroid_of_record, room[0], base=self.base)
        return room

    def seen(self, given: Records, results: Sequence[Tensor]) -> Sequence[Tensor]:
        return (given.rows64(results[0]),)

    def truth(self, given: Records) -> Sequence[Tensor]:
        return (given.rows.double(),)

    def law(self, given: Records) -> Sequence[Tensor]:
        expected = given.buffer.cpu().clone()
        delta_encode_ref.delta_encode(given.rows.cpu(), *given.by_host, expected, base=self.base)
        return (expected,)

    def moved(self, given: Records) -> int:
        return given.nbytes + size(given.rows)


def values64(codes: Tensor, block_scales: Tensor, scale: Tensor, width: int) -> Tensor:
    """Float64 [n, width] of bytes, [n, code_bytes] and [n, groups]: two E2M1 codes a byte, the even column low; an E4M3
    scale for 16 columns, with 4 bits of exponent, 3 of mantissa, subnormal at exponent 0, 127 for NaN; a `scale` for
    each row, or for all. From the description of the format: it shares no line with the kernels' codecs."""
    codes, block_scales = codes.long(), block_scales.long()
    magnitudes = torch.tensor(_E2M1, dtype=torch.float64, device=codes.device)
    both = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    signed = magnitudes[both & 7] * (1 - 2 * (both >> 3))
    exponent, mantissa = block_scales >> 3, (block_scales & 7).double()
    scales = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.double() - 7))
    scales = scales.where(block_scales != 127, torch.nan) * scale.double().reshape(-1, 1)
    return (signed * scales.repeat_interleave(16, dim=1))[:, :width]


def rows64(buffer: Tensor, table: RecordTable, centroids: Tensor | None, of_record: Tensor | None) -> Tensor:
    """Float64 [n, width] of all records of `table.rows[k]` rows at byte `table.offsets[k]`: codes, an FP32 scale, with
    centroids a BF16 projection for each row, block scales."""
    rows, groups = [], -(-table.width // 16)
    for k, (count, at) in enumerate(zip(table.rows, table.offsets, strict=True)):
        sizes = [count * groups * 8, 4, 0 if centroids is None else 2 * count, count * groups]
        codes, scale, along, block_scales = buffer[at : at + sum(sizes)].split(sizes)
        scale = scale.clone().view(torch.float32)
        values = values64(codes.view(count, -1), block_scales.view(count, -1), scale, table.width)
        if centroids is not None and of_record is not None:
            values += along.clone().view(torch.bfloat16).double()[:, None] * centroids[of_record[k]].double()
        rows.append(values)
    return torch.cat(rows)


def _put(given: Records, rows: Tensor, standing: Tensor) -> Tensor:
    """`standing` with `rows` where they belong."""
    places = torch.arange(len(rows)) if given.places is None else given.places
    standing[places.to(rows.device), : rows.shape[1]] = rows
    return standing


_RAGGED = (64, 1, 100, 63, 7)
_RECORDS = (63, *(64,) * 254)
CHECKED: tuple[KernelCase, ...] = (
    DeltaDecode(counts=_RAGGED),
    DeltaDecode(counts=_RAGGED, pinned=True),
    DeltaDecode(counts=_RAGGED, delta=False),
    DeltaDecode(counts=_RAGGED, width=3584, dtype=torch.float32, placed=False),
    DeltaDecode(counts=_RAGGED, width=3573, dtype=torch.float16),
    DeltaEncode(counts=_RAGGED),
    DeltaEncode(counts=_RAGGED, delta=False),
    DeltaEncode(counts=_RAGGED, width=3573, dtype=torch.float32, base="mean"),
)
TIMED: tuple[KernelCase, ...] = (
    DeltaDecode(counts=_RECORDS),
    DeltaDecode(counts=_RECORDS[:5]),  # of one layer's update
    DeltaEncode(counts=_RECORDS),
)
