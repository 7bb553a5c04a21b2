"""Cases of rows that are multiplied by a weight in codes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, size
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_code import WeightCode


class Given(NamedTuple):
    """The factors."""

    rows: Tensor
    weight: CodedRows


@dataclass(frozen=True, kw_only=True)
class WeightProduct(KernelCase):
    """Given: rows, and a weight [outputs, inputs]. Results in float32 have to be those of the values; in 16 bits the
    values of int4 are rounded on their way."""

    kernel, roundings = "weight_product", 3
    code: WeightCode
    rows: int
    inputs: int = 4096
    outputs: int = 4096

    def tiny(self) -> Self:
        return replace(self, rows=min(self.rows, 19), inputs=80, outputs=40)

    def draw(self, generator: torch.Generator) -> Given:
        weight = normal(generator, self.outputs, self.inputs, dtype=self.dtype)
        return Given(normal(generator, self.rows, self.inputs, dtype=self.dtype), CodedRows.of(weight, self.code))

    def run(self, given: Given, room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel)(*given),)

    def truth(self, given: Given) -> Sequence[Tensor]:
        exact = replace(given.weight, dtype=torch.float32).values()
        return (given.rows.double() @ exact.double().mT,)

    def moved(self, given: Given) -> int:
        return size(given.rows) + given.weight.nbytes + self.rows * self.outputs * self.dtype.itemsize

    def arithmetic(self, given: Given) -> int:
        return 2 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class OneWay(WeightProduct):
    """The product by one of its two ways, at any number of rows; without a way, `DECODED_FROM` rows divide them."""

    way: str

    def run(self, given: Given, room: Sequence[Tensor]) -> Sequence[Tensor]:
        product = given.rows.new_empty(len(given.rows), given.weight.shape[0])
        op(self.kernel, self.way)(*given, product)
        return (product,)


CHECKED: tuple[KernelCase, ...] = (
    *(WeightProduct(code=code, rows=32) for code in WeightCode),
    *(WeightProduct(code=code, rows=1000, inputs=12288) for code in WeightCode),
    *(WeightProduct(code=code, rows=33, dtype=torch.float32) for code in WeightCode),
)
TIMED: tuple[KernelCase, ...] = (
    *(
        WeightProduct(code=code, rows=rows, inputs=inputs, outputs=outputs)
        for code in WeightCode
        for rows, inputs, outputs in ((32, 4096, 12288), (32, 12288, 4096), (4096, 4096, 12288))
    ),
    *(
        OneWay(code=code, rows=rows, outputs=12288, way=way)
        for code in (WeightCode.INT4, WeightCode.NVFP4)
        for rows in (64, 128, 256, 1024)
        for way in ("product_by_tiles", "product_by_parts")
    ),
)
