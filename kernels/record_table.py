"""Where records of coded rows lie in a buffer, for the host and for the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from tiered.kernels.host_values import on_device
from tiered.kernels.launch import VECTOR
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import WORD

RECORD_ALIGNMENT = 128  # bytes: what one request over PCIe or to device memory carries


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """Some records of one buffer, and their rows, which stand record after record in the tensor beside it.

    Made by `build` from host integers, so that no kernel launch has to ask the device for a size.

    Attributes:
        rows: rows of each record.
        offsets: byte of the buffer at which each record begins.
        row_bytes: bytes of a row.
        at: byte of the buffer at which each row begins, on the device of the kernels.
        record_of_row: record of each row, there.
    """

    rows: tuple[int, ...]
    offsets: tuple[int, ...]
    row_bytes: int
    at: Int64[Tensor, " n"]
    record_of_row: Int64[Tensor, " n"]

    @classmethod
    def build(
        cls, rows: Sequence[int], offsets: Sequence[int], *, row_bytes: int, device: torch.device | str
    ) -> "RecordTable":
        """The table of records of `rows[k]` rows at byte `offsets[k]`, for kernels on `device`.

        The device's part, 16 bytes a row, goes there in one copy that the host does not wait for.

        Raises:
            ValueError: a record without rows, an offset that is negative or no multiple of 128, records that overlap,
                lists of different lengths, or rows that are no whole words.
        """
        if len(rows) != len(offsets) or row_bytes < 1 or row_bytes % WORD or any(count < 1 for count in rows):
            raise ValueError(
                f"rows = {list(rows)}, offsets = {list(offsets)}, row_bytes = {row_bytes}: one offset a record, "
                f"records of one row or more and rows of whole words of {WORD} bytes are allowed"
            )
        if any(offset < 0 or offset % RECORD_ALIGNMENT for offset in offsets):
            raise ValueError(f"offsets = {list(offsets)}: multiples of {RECORD_ALIGNMENT} from 0 up are allowed")
        spans = sorted((offset, offset + count * row_bytes) for offset, count in zip(offsets, rows, strict=True))
        for (_, end), (begin, _) in pairwise(spans):
            if begin < end:
                raise ValueError(f"records overlap: one ends at byte {end}, another begins at byte {begin}")
        counts = torch.tensor(rows, dtype=torch.int64)
        record_of_row = torch.repeat_interleave(torch.arange(len(rows)), counts, output_size=sum(rows))
        first = torch.tensor(offsets, dtype=torch.int64)
        starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int64)[:-1]
        at = (first - starts * row_bytes).index_select(0, record_of_row) + torch.arange(sum(rows)) * row_bytes
        # Both parts begin at a multiple of 16 bytes: Triton compiles a kernel anew for arguments that do not.
        host = torch.cat([at, at[: len(at) % 2], record_of_row])
        at, _, record_of_row = on_device(host, device).split([sum(rows), sum(rows) % 2, sum(rows)])
        return cls(tuple(rows), tuple(offsets), row_bytes, at, record_of_row)

    @property
    def total(self) -> int:
        """Rows of all records."""
        return len(self.record_of_row)

    def check(self, buffer: UInt8[Tensor, " bytes"], rows: int, base: RowBase | None, *, least: bool = False) -> None:
        """Raise `ValueError` unless the records fit `buffer` and there are as many `rows`, or, with `least`, as many or
        more; and unless `base` has one for each row."""
        end = max((at + count * self.row_bytes for at, count in zip(self.offsets, self.rows, strict=True)), default=0)
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.stride() != (1,) or buffer.numel() < end:
            raise ValueError(
                f"a buffer of {buffer.dtype} {tuple(buffer.shape)}, strides {buffer.stride()}, cannot hold records up "
                f"to byte {end}: contiguous uint8 is allowed"
            )
        if buffer.data_ptr() % VECTOR:
            raise ValueError(f"the buffer lies at {buffer.data_ptr():#x}: multiples of {VECTOR} are allowed")
        if not (rows >= self.total if least else rows == self.total):
            raise ValueError(f"{rows} rows do not fit the {self.total} of the table")
        if base is not None and base.of_row.shape != (self.total,):
            raise ValueError(f"bases of {tuple(base.of_row.shape)} rows do not fit the {self.total} of the table")

    def put(self, coded: UInt8[Tensor, "n row_bytes"], buffer: UInt8[Tensor, " bytes"]) -> None:
        """Write rows, one behind the other, to their records in `buffer`; its other bytes stay as they are."""
        for record, rows in zip(self._records(buffer), coded.split(self.rows), strict=True):
            record.copy_(rows)

    def taken(self, buffer: UInt8[Tensor, " bytes"]) -> UInt8[Tensor, "n row_bytes"]:
        """The rows of all records, one behind the other: a view of a single record, a copy of several."""
        records = self._records(buffer)
        return records[0] if len(records) == 1 else torch.cat([buffer[:0].view(0, self.row_bytes), *records])

    def _records(self, buffer: UInt8[Tensor, " bytes"]) -> list[UInt8[Tensor, "rows row_bytes"]]:
        parts = zip(self.offsets, self.rows, strict=True)
        return [buffer[at : at + count * self.row_bytes].view(count, self.row_bytes) for at, count in parts]
