"""Where packed NVFP4 records lie in a buffer, for the host and for the kernels, and the parts of one as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Float, Float32, Int64, UInt8
from torch import Tensor

from tiered.kernels.host_values import on_device
from tiered.kernels.record_layout import Nvfp4Layout, part_bytes

RECORD_ALIGNMENT = 128  # bytes: what one request over PCIe or to device memory carries
BUFFER_ALIGNMENT = 16  # bytes that one thread of a GPU moves at once


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """Some records of one buffer, and their rows, which stand record after record in the tensor beside it.

    Made by `build` from host integers, so that no kernel launch has to ask the device for a size.

    Attributes:
        rows: rows of each record.
        offsets: byte of the buffer at which each record begins.
        width: columns of a row.
        delta: the records hold a projection for every row, and need centroids.
        starts: the first row of each record, and the number of all rows, on the device of the kernels.
        at: `offsets`, there.
        record_of_row: record of each row, there.
    """

    rows: tuple[int, ...]
    offsets: tuple[int, ...]
    width: int
    delta: bool
    starts: Int64[Tensor, " records_and_one"]
    at: Int64[Tensor, " records"]
    record_of_row: Int64[Tensor, " n"]

    @classmethod
    def build(
        cls, rows: Sequence[int], offsets: Sequence[int], *, width: int, delta: bool, device: torch.device | str
    ) -> "RecordTable":
        """The table of records of `rows[k]` rows at byte `offsets[k]`, for kernels on `device`.

        The device's part (16 bytes a record, 8 a row and 16 more) goes there in one copy that the host does not wait
        for.

        Raises:
            ValueError: a record without rows, an offset that is negative or no multiple of 128, records that overlap,
                lists of different lengths, or a width that is not positive.
        """
        if len(rows) != len(offsets) or width < 1 or any(count < 1 for count in rows):
            raise ValueError(
                f"rows = {list(rows)}, offsets = {list(offsets)}, width = {width}: one offset a record, records of "
                "one row or more and a positive width are allowed"
            )
        if any(offset < 0 or offset % RECORD_ALIGNMENT for offset in offsets):
            raise ValueError(f"offsets = {list(offsets)}: multiples of {RECORD_ALIGNMENT} from 0 up are allowed")
        spans = sorted(
            (offset, offset + sum(parts)) for offset, parts in zip(offsets, part_bytes(rows, width, delta), strict=True)
        )
        for (_, end), (begin, _) in pairwise(spans):
            if begin < end:
                raise ValueError(f"records overlap: one ends at byte {end}, another begins at byte {begin}")

        counts = torch.tensor(rows, dtype=torch.int64)
        record_of_row = torch.repeat_interleave(torch.arange(len(rows)), counts, output_size=sum(rows))
        # Each part begins at a multiple of 16 bytes: Triton compiles a kernel anew for arguments that do not.
        odd = len(rows) % 2
        host = torch.cat([torch.tensor([0, *accumulate(rows), *[0] * (1 - odd), *offsets, *[0] * odd]), record_of_row])
        starts, at, record_of_row = on_device(host, device).split([len(rows) + 2 - odd, len(rows) + odd, sum(rows)])
        starts, at = starts[: len(rows) + 1], at[: len(rows)]
        return cls(tuple(rows), tuple(offsets), width, delta, starts, at, record_of_row)

    @property
    def total(self) -> int:
        """Rows of all records."""
        return len(self.record_of_row)

    @property
    def part_bytes(self) -> list[tuple[int, int, int, int]]:
        """Bytes of the parts of each record, in their order."""
        return part_bytes(self.rows, self.width, self.delta)

    def records(self, buffer: UInt8[Tensor, " bytes"]) -> list[UInt8[Tensor, " _"]]:
        """The records in `buffer`."""
        spans = zip(self.offsets, self.part_bytes, strict=True)
        return [buffer[offset : offset + sum(parts)] for offset, parts in spans]

    def layout(self, record: int) -> Nvfp4Layout:
        """The parts of a record."""
        return Nvfp4Layout(self.rows[record], self.width, self.delta)

    def check(
        self,
        buffer: UInt8[Tensor, " bytes"],
        centroids: Float[Tensor, "clusters width"] | None,
        centroid_of_record: Int64[Tensor, " records"] | None,
    ) -> None:
        """Raise `ValueError` unless the records fit `buffer` and the centroids fit the records."""
        end = max((offset + sum(parts) for offset, parts in zip(self.offsets, self.part_bytes, strict=True)), default=0)
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.stride() != (1,) or buffer.numel() < end:
            raise ValueError(
                f"a buffer of {buffer.dtype} {tuple(buffer.shape)}, strides {buffer.stride()}, cannot hold records up "
                f"to byte {end}: contiguous uint8 is allowed"
            )
        if buffer.data_ptr() % BUFFER_ALIGNMENT:
            raise ValueError(f"the buffer lies at {buffer.data_ptr():#x}: multiples of {BUFFER_ALIGNMENT} are allowed")
        if (centroids is not None) != self.delta or (centroid_of_record is not None) != self.delta:
            raise ValueError(
                f"delta = {self.delta}, but centroids = {_shape(centroids)} and centroid_of_record = "
                f"{_shape(centroid_of_record)}: both with delta records, none with others"
            )
        if centroids is not None and centroids.shape[1:] != (self.width,):
            raise ValueError(f"centroids {_shape(centroids)} do not fit rows of width {self.width}")
        if centroid_of_record is not None and centroid_of_record.shape != (len(self.rows),):
            raise ValueError(f"centroid_of_record {_shape(centroid_of_record)} does not fit {len(self.rows)} records")


class Packed(NamedTuple):
    """The parts of all records of a table, each part in one piece: rows as they stand in the table."""

    codes: UInt8[Tensor, "n code_bytes"]
    scale: Float32[Tensor, " records"]
    projections: BFloat16[Tensor, " delta_rows"]
    block_scales: UInt8[Tensor, "n groups"]


def pack(packed: Packed, table: RecordTable, out: UInt8[Tensor, " bytes"]) -> None:
    """Write the records of `table`, at least one, into `out`; its other bytes stay as they are."""
    whole = (part.flatten().view(torch.uint8) for part in packed)
    pieces = (part.split(sizes) for part, sizes in zip(whole, zip(*table.part_bytes, strict=True), strict=True))
    for record, parts in zip(table.records(out), zip(*pieces, strict=True), strict=True):
        torch.cat(parts, out=record)


def unpack(table: RecordTable, buffer: UInt8[Tensor, " bytes"]) -> Packed:
    """The parts of the records of `table`, at least one: views of a single record, copies of several."""
    pieces = (record.split(sizes) for record, sizes in zip(table.records(buffer), table.part_bytes, strict=True))
    codes, scale, projections, block_scales = (
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)
    )
    return Packed(
        codes.view(table.total, -1),
        scale.view(torch.float32),
        projections.view(torch.bfloat16),
        block_scales.view(table.total, -1),
    )


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
