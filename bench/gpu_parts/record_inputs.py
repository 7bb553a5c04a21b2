"""What cases of packed records draw: records in a buffer, and the rows beside them."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, dtype_name, normal, random_bytes, shuffled, size
from gpu_parts.nvfp4_format import rows64
from tiered.kernels.record_layout import Nvfp4Layout
from tiered.kernels.record_table import RecordTable

NVFP4_ERROR = 0.15  # of the norm of normal numbers: 0.095, and room for a handful of them


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
        table = self.table
        return rows64(buffer, table.rows, table.offsets, table.width, self.centroids, self.centroid_of_record)

    @property
    def nbytes(self) -> int:
        """What either way must move beside the rows: records, table, and the centroids that are chosen, once each."""
        chosen = 0
        if self.centroids is not None and self.centroid_of_record is not None:
            chosen = len(self.centroid_of_record.unique()) * self.centroids[0].numel() * self.centroids.element_size()
        records = sum(self.table.layout(k).nbytes for k in range(len(self.table.rows)))
        tables = size(self.table.starts, self.table.at, self.table.record_of_row, self.centroid_of_record)
        return records + tables + chosen


@dataclass(frozen=True, kw_only=True)
class RecordCase(KernelCase[Records]):
    """`counts`: rows of each record. `pinned`: the records lie in host memory that the device can read."""

    counts: tuple[int, ...]
    width: int
    dtype: torch.dtype
    delta: bool = True
    pinned: bool = False

    @property
    def name(self) -> str:
        notes = ["" if self.delta else "plain", "pinned" if self.pinned else ""]
        return " ".join([self.kernel, f"{sum(self.counts)}x{self.width}", dtype_name(self.dtype), *filter(None, notes)])

    def tiny(self) -> Self:
        return replace(self, counts=(3, 1, 2), width=32 + self.width % 16)

    def records(self, generator: torch.Generator, rows: Tensor) -> Records:
        """With random bytes for a buffer."""
        device = generator.device
        layouts = [Nvfp4Layout(count, self.width, self.delta) for count in self.counts]
        order = shuffled(generator, len(self.counts)).tolist()
        rooms = [-(-layout.nbytes // 128) * 128 + 128 * (k % 2) for k, layout in enumerate(layouts)]
        starts = dict(zip(order, accumulate((rooms[k] for k in order), initial=128), strict=False))
        offsets = [starts[k] for k in range(len(self.counts))]
        table = RecordTable.build(self.counts, offsets, width=self.width, delta=self.delta, device=device)
        buffer = random_bytes(generator, 128 + sum(rooms))
        centroids = chosen = None
        if self.delta:
            centroids = normal(generator, len(self.counts) + 1, self.width, dtype=self.dtype)
            chosen = shuffled(generator, len(self.counts) + 1)[: len(self.counts)]
        return Records(table, centroids, chosen, buffer, rows)


def stored(rows: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """float32 `rows` as a kernel stores them: rounded, but that Triton's interpreter cuts bfloat16 off."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        rows = (rows.contiguous().view(torch.int32) & -0x10000).view(torch.float32)
    return rows.to(dtype)
