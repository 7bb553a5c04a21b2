"""Cases of packed delta records, both ways. Their bytes are the law."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpu_parts.kernel_case import ROUNDING, KernelCase, normal, op, random_bytes, shuffled, size
from gpu_parts.record_inputs import NVFP4_ERROR, RecordCase, Records, stored
from tiered.kernels import delta_decode_ref, delta_encode_ref
from tiered.kernels.delta_encode_ref import Base
from tiered.kernels.record_table import record_views

_NOISE, _ALONG = 0.25, 1.25  # of rows: what is beside their centroid, and their projection on it
_SPARE = 7  # rows of an output that no record has


@dataclass(frozen=True, kw_only=True)
class DeltaDecode(RecordCase):
    """Every code there is, block scales of all sizes. `placed`: rows go to places, in rows that lie apart."""

    kernel: ClassVar[str] = "delta_decode"
    placed: bool = True

    @property
    def bound(self) -> float:
        return 2 * ROUNDING[self.dtype]  # Triton's interpreter does not round bfloat16 to nearest

    def draw(self, generator: torch.Generator) -> Records:
        total = sum(self.counts)
        standing = normal(generator, total + _SPARE, self.width + (16 if self.placed else 0), dtype=self.dtype)
        given = self.records(generator, standing)
        places = shuffled(generator, total + _SPARE)[:total] if self.placed else None
        for k, offset in enumerate(given.table.offsets):
            layout = given.table.layout(k)
            record = record_views(given.buffer[offset : offset + layout.nbytes], layout)
            record.scale.copy_(normal(generator, 1).abs_().add_(0.1))
            record.block_scales.copy_(random_bytes(generator, *record.block_scales.shape, below=127))
            if record.projections is not None:
                record.projections.copy_(normal(generator, layout.rows))
        pinned = self.pinned and generator.device.type == "cuda"
        return replace(given, places=places, buffer=given.buffer.cpu().pin_memory() if pinned else given.buffer)

    def room(self, given: Records) -> tuple[Tensor, ...]:
        return (given.rows.clone(),)

    def run(self, given: Records, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = room[0][:, : self.width]
        op(self.kernel)(given.buffer, given.table, given.centroids, given.centroid_of_record, out, given.places)
        return (room[0],)

    def truth(self, given: Records) -> tuple[Tensor, ...]:
        return (_put(given, given.rows64(given.buffer.to(given.rows.device)), given.rows.double()),)

    def law(self, given: Records) -> tuple[Tensor, ...]:
        table, centroids, chosen = given.by_host
        rows = torch.empty(table.total, table.width)
        delta_decode_ref.delta_decode(given.buffer.cpu(), table, centroids, chosen, rows)
        return (_put(given, stored(rows, self.dtype, given.rows.device), given.rows.cpu().clone()),)

    def moved(self, given: Records) -> int:
        return given.nbytes + size(given.places) + given.table.total * self.width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class DeltaEncode(RecordCase):
    """Rows near their centroids, which lie apart in memory."""

    kernel: ClassVar[str] = "delta_encode"
    base: Base = "projection"

    @property
    def bound(self) -> float:
        if not self.delta:
            return NVFP4_ERROR
        residual = _NOISE if self.base == "projection" else math.hypot(_NOISE, _ALONG - 1)
        return NVFP4_ERROR * residual / math.hypot(_NOISE, _ALONG)

    def draw(self, generator: torch.Generator) -> Records:
        rows = normal(generator, sum(self.counts), self.width + 16, dtype=self.dtype)[:, 8 : 8 + self.width]
        given = self.records(generator, rows)
        if given.centroids is not None:
            of_record = given.centroids[given.centroid_of_record]
            rows.mul_(_NOISE).add_(of_record[given.table.record_of_row], alpha=_ALONG)
        return given

    def room(self, given: Records) -> tuple[Tensor, ...]:
        return (given.buffer.clone(),)

    def run(self, given: Records, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        op(self.kernel)(given.rows, given.table, given.centroids, given.centroid_of_record, room[0], base=self.base)
        return (room[0],)

    def seen(self, given: Records, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (given.rows64(results[0]),)

    def truth(self, given: Records) -> tuple[Tensor, ...]:
        return (given.rows.double(),)

    def law(self, given: Records) -> tuple[Tensor, ...]:
        expected = given.buffer.cpu().clone()
        delta_encode_ref.delta_encode(given.rows.cpu(), *given.by_host, expected, base=self.base)
        return (expected,)

    def moved(self, given: Records) -> int:
        return given.nbytes + size(given.rows)


def _put(given: Records, rows: Tensor, standing: Tensor) -> Tensor:
    """`standing` with `rows` where they belong."""
    places = torch.arange(len(rows)) if given.places is None else given.places
    standing[places.to(rows.device), : rows.shape[1]] = rows
    return standing


_BF16, _FP32 = torch.bfloat16, torch.float32
_RAGGED = (64, 1, 100, 63, 7)
_RECORDS = (63, *(64,) * 254)
CHECKED: tuple[KernelCase[Any], ...] = (
    DeltaDecode(counts=_RAGGED, width=4096, dtype=_BF16),
    DeltaDecode(counts=_RAGGED, width=4096, dtype=_BF16, pinned=True),
    DeltaDecode(counts=_RAGGED, width=4096, dtype=_BF16, delta=False),
    DeltaDecode(counts=_RAGGED, width=3584, dtype=_FP32, placed=False),
    DeltaDecode(counts=_RAGGED, width=3573, dtype=torch.float16),
    DeltaEncode(counts=_RAGGED, width=4096, dtype=_BF16),
    DeltaEncode(counts=_RAGGED, width=4096, dtype=_BF16, delta=False),
    DeltaEncode(counts=_RAGGED, width=3573, dtype=_FP32, base="mean"),
)
TIMED: tuple[KernelCase[Any], ...] = (
    DeltaDecode(counts=_RECORDS, width=4096, dtype=_BF16),
    DeltaDecode(counts=_RECORDS[:5], width=4096, dtype=_BF16),  # of one layer's update
    DeltaEncode(counts=_RECORDS, width=4096, dtype=_BF16),
)
