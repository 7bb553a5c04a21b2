"""A weight in the codes of weight_code.py."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from tiered.kernels.decode_weight_ref import decode_weight
from tiered.kernels.encode_weight_ref import encode_weight
from tiered.kernels.weight_code import WeightCode


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, inner], each output row in codes of its own.

    Attributes:
        bytes: of the rows, with no gaps.
        code: that they are in.
        inner: elements of a row.
        dtype: of its values.
    """

    bytes: UInt8[Tensor, "out row_bytes"]
    code: WeightCode
    inner: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, values: Float[Tensor, "out inner"], code: WeightCode, into: UInt8[Tensor, "out row_bytes"] | None = None
    ) -> "CodedWeight":
        """`values`, all finite, in `code`. `into`: where its bytes go; None: memory of their own."""
        return cls(encode_weight(values, code, into), code, values.shape[1], values.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the values."""
        return len(self.bytes), self.inner

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.bytes.device

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return self.bytes.nbytes

    def values(self, rows: slice | Int[Tensor, " n"] = slice(None)) -> Float[Tensor, "n inner"]:
        """What the codes of `rows` stand for, in `dtype`."""
        coded = self.bytes[rows] if isinstance(rows, slice) else self.bytes.index_select(0, rows)
        return decode_weight(coded, self.code, self.inner, self.dtype)
