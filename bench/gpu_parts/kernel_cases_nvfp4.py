"""Cases of bare NVFP4, both ways. Its bytes are the law."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import ROUNDING, KernelCase, dtype_name, normal, op, random_bytes, size
from gpu_parts.nvfp4_format import values64
from gpu_parts.record_inputs import NVFP4_ERROR, stored
from tiered.kernels import nvfp4_decode_ref, nvfp4_encode_ref
from tiered.kernels.nvfp4_scale import nvfp4_scale


@dataclass(frozen=True, kw_only=True)
class _BareCase(KernelCase[tuple[Tensor, ...]]):
    rows: int
    width: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.rows}x{self.width} {dtype_name(self.dtype)}"

    def tiny(self) -> Self:
        return replace(self, rows=6, width=32 + self.width % 16)


@dataclass(frozen=True, kw_only=True)
class Nvfp4Decode(_BareCase):
    """Given: codes, block scales and a scale for each row, all there are."""

    kernel: ClassVar[str] = "nvfp4_decode"

    @property
    def bound(self) -> float:
        return 2 * ROUNDING[self.dtype]  # as for records

    def draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        groups = -(-self.width // 16)
        block_scales = random_bytes(generator, self.rows, groups, below=127)
        return random_bytes(generator, self.rows, groups * 8), block_scales, normal(generator, self.rows).abs_().add_(1)

    def run(self, given: tuple[Tensor, ...], room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (op(self.kernel)(*given, self.width, self.dtype),)

    def truth(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        codes, block_scales, scale = given
        return (values64(codes, block_scales, scale, self.width),)

    def law(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        codes, block_scales, scale = (part.cpu() for part in given)
        rows = nvfp4_decode_ref.nvfp4_decode(codes, block_scales, scale, self.width, torch.float32)
        return (stored(rows, self.dtype, given[0].device),)

    def moved(self, given: tuple[Tensor, ...]) -> int:
        return size(*given) + self.rows * self.width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Nvfp4Encode(_BareCase):
    """Given: rows, which lie apart in memory, and the scale of each."""

    kernel: ClassVar[str] = "nvfp4_encode"

    @property
    def bound(self) -> float:
        return NVFP4_ERROR

    def draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        rows = normal(generator, self.rows, self.width + 16, dtype=self.dtype)[:, 8 : 8 + self.width]
        return rows, nvfp4_scale(rows.float().abs().amax(1))

    def run(self, given: tuple[Tensor, ...], room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(op(self.kernel)(*given))

    def seen(self, given: tuple[Tensor, ...], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (values64(results[0], results[1], given[1], self.width),)

    def truth(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0].double(),)

    def law(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return nvfp4_encode_ref.nvfp4_encode(given[0].cpu(), given[1].cpu())

    def moved(self, given: tuple[Tensor, ...]) -> int:
        return size(*given) + self.rows * -(-self.width // 16) * 9
