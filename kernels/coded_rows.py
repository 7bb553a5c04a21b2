"""Rows of keys or values in the codes of row_code.py, read as a tensor of rows can be."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.decode_rows_ref import decode_rows
from tiered.kernels.encode_rows_ref import encode_rows
from tiered.kernels.row_code import RowCode


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A tensor of rows in codes: its shape, slices of all dimensions but the last, and its values.

    Attributes:
        bytes: of the rows.
        code: that they are in.
        elements: of a row.
        dtype: of its values.
    """

    bytes: UInt8[Tensor, "*rows row_bytes"]
    code: RowCode
    elements: int
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: Float[Tensor, "*rows elements"], code: RowCode) -> "CodedRows":
        """`rows` in `code`."""
        encode = for_device(encode_rows, rows.device)
        return cls(encode(rows, code, code.row_bytes(rows.shape[-1])), code, rows.shape[-1], rows.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return (*self.bytes.shape[:-1], self.elements)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.bytes.device

    def __getitem__(self, part: slice | tuple[slice, ...]) -> "CodedRows":
        return replace(self, bytes=self.bytes[part])

    def values(self) -> Float[Tensor, "*rows elements"]:
        """What the codes stand for."""
        return decode_rows(self.bytes, self.code, self.elements, self.dtype)
