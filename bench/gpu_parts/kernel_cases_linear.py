"""A linear layer over the rows of a block, by torch, which takes most of a step's time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, size


@dataclass(frozen=True, kw_only=True)
class Linear(KernelCase):
    """Given: rows, and weights [outputs, inputs]."""

    kernel, triton, roundings = "linear", False, 2
    rows: int
    inputs: int
    outputs: int

    def tiny(self) -> Self:
        return replace(self, rows=4, inputs=self.inputs // 128, outputs=self.outputs // 128)

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        weights = normal(generator, self.outputs, self.inputs, dtype=self.dtype)
        return normal(generator, self.rows, self.inputs, dtype=self.dtype), weights

    def run(self, given: tuple[Tensor, Tensor], room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (F.linear(*given),)

    def truth(self, given: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        return (given[0].double() @ given[1].double().mT,)

    def moved(self, given: tuple[Tensor, Tensor]) -> int:
        return size(*given) + self.rows * self.outputs * self.dtype.itemsize

    def arithmetic(self, given: tuple[Tensor, Tensor]) -> int:
        return 2 * self.rows * self.inputs * self.outputs


CHECKED: tuple[KernelCase, ...] = ()
TIMED: tuple[KernelCase, ...] = (
    Linear(rows=32, inputs=4096, outputs=12288),
    Linear(rows=32, inputs=12288, outputs=4096),
)
