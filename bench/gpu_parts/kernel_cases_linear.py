"""A linear layer over the rows of a block, by torch: what a step spends most of its time with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_parts.kernel_case import ROUNDING, KernelCase, dtype_name, normal, size


@dataclass(frozen=True, kw_only=True)
class Linear(KernelCase[tuple[Tensor, Tensor]]):
    """Given: rows, and weights [outputs, inputs]."""

    kernel: ClassVar[str] = "linear"
    triton: ClassVar[bool] = False
    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.rows}x{self.inputs}x{self.outputs} {dtype_name(self.dtype)}"

    @property
    def bound(self) -> float:
        return 2 * ROUNDING[self.dtype]

    def tiny(self) -> Self:
        return replace(self, rows=4, inputs=self.inputs // 128, outputs=self.outputs // 128)

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        weights = normal(generator, self.outputs, self.inputs, dtype=self.dtype)
        return normal(generator, self.rows, self.inputs, dtype=self.dtype), weights

    def run(self, given: tuple[Tensor, Tensor], room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (F.linear(*given),)

    def truth(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        rows, weights = given
        return (rows.double() @ weights.double().mT,)

    def moved(self, given: tuple[Tensor, Tensor]) -> int:
        return size(*given) + self.rows * self.outputs * self.dtype.itemsize

    def arithmetic(self, given: tuple[Tensor, Tensor]) -> int:
        return 2 * self.rows * self.inputs * self.outputs


CHECKED: tuple[KernelCase[Any], ...] = ()
TIMED: tuple[KernelCase[Any], ...] = (
    Linear(rows=32, inputs=4096, outputs=12288, dtype=torch.bfloat16),
    Linear(rows=32, inputs=12288, outputs=4096, dtype=torch.bfloat16),
)
