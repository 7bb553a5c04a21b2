"""Cases of rows of keys and values on their way into codes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, size
from tiered.kernels.encode_rows_ref import encode_rows
from tiered.kernels.row_code import RowCode


@dataclass(frozen=True, kw_only=True)
class EncodeRows(KernelCase):
    """Given: the keys or values of some rows, as a projection leaves them."""

    kernel = "encode_rows"
    code: RowCode
    rows: int
    heads: int = 32
    head_dim: int = 128

    def tiny(self) -> Self:
        return replace(self, rows=11, heads=3, head_dim=32)

    def draw(self, generator: torch.Generator) -> Tensor:
        return normal(generator, 1, self.rows, self.heads, self.head_dim, dtype=self.dtype).transpose(1, 2)

    def run(self, given: Tensor, room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel)(given, self.code, self.code.row_bytes(self.head_dim)),)

    def law(self, given: Tensor) -> Sequence[Tensor]:
        return (encode_rows(given, self.code, self.code.row_bytes(self.head_dim)),)

    def moved(self, given: Tensor) -> int:
        return size(given) + given[..., 0].numel() * self.code.row_bytes(self.head_dim)


CHECKED: tuple[KernelCase, ...] = (
    *(EncodeRows(code=code, rows=257) for code in RowCode),
    *(EncodeRows(code=code, rows=257, dtype=torch.float32) for code in RowCode),
)
TIMED: tuple[KernelCase, ...] = tuple(EncodeRows(code=code, rows=rows) for code in RowCode for rows in (32, 512))
