"""Rows in the codes of row_code.py with the interface of a tensor of rows: keys, values, or a weight."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.decode_rows_ref import decode_rows
from tiered.kernels.encode_rows_ref import encode_rows
from tiered.kernels.row_code import Code, RowCode

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A tensor of coded rows: its shape, slices of all dimensions but the last, and its values.

    Attributes:
        bytes: bytes of the rows.
        code: code of the rows.
        elements: elements of a row.
        dtype: dtype of its values.
    """

    bytes: UInt8[Tensor, "*rows row_bytes"]
    code: Code
    elements: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, rows: Float[Tensor, "*rows elements"], code: Code, into: UInt8[Tensor, "*rows row_bytes"] | None = None
    ) -> "CodedRows":
        """`rows` in `code`. Their bytes go `into` contiguous memory; None for newly allocated memory."""
        *count, elements = rows.shape
        coded = rows.new_empty(*count, code.row_bytes(elements), dtype=torch.uint8) if into is None else into
        _op(encode_rows, code, rows.device)(rows.flatten(0, -2), code, coded.view(-1, coded.shape[-1]))
        return cls(coded, code, elements, rows.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.bytes.shape[:-1], self.elements)

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    def __getitem__(self, part: slice | Int[Tensor, "*index"] | tuple[slice, ...]) -> "CodedRows":
        return replace(self, bytes=self.bytes[part])

    def values(self) -> Float[Tensor, "*rows elements"]:
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        coded = self.bytes.flatten(0, -2).contiguous()
        _op(decode_rows, self.code, self.device)(coded, self.code, values.flatten(0, -2))
        return values


# Queries of rows, or their attention; keys or values, uncoded; and the same, or coded.
Heads = Float[Tensor, "batch heads rows head_dim"]
Columns = Float[Tensor, "batch kv_heads length head_dim"]
KeyValue = Columns | CodedRows


def _op(reference: Callable[P, R], code: Code, device: torch.device) -> Callable[P, R]:
    """The op for rows in `code`. Codes of weights alone have no kernels; plain torch codes and decodes them."""
    return for_device(reference, device) if isinstance(code, RowCode) else reference
