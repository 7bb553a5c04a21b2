"""Triton kernels: how they are started, and what CI compiles of them ahead of time, on a machine without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

VECTOR = 16  # bytes that a thread loads or stores at once, at most


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, on: Tensor, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)` on the current stream of the device of `on`, whichever device is current.

    Triton types a kernel as the Python function that it is written as, so no type checker can know what may be passed
    to it, `num_warps` for one; here is the place where that is given up.
    """
    with torch.cuda.device_of(on):
        kernel[grid](*arguments, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One specialisation of a kernel, as its launcher would ask for it. Every module `x.py` lists its own in
    `COMPILATIONS`, each kernel's most telling one first: tests/test_compilation.py compiles that one in short, and all
    of them for every architecture in long.

    Attributes:
        kernel: the `@triton.jit` function.
        types: Triton type (`"*u8"`, `"i32"`, `"fp32"`) by the names of the arguments that have it, spaces between.
        constexprs: value by name of each constexpr argument, which may be one of those in `types`.
        multiples: names of arguments that are multiples of 16, spaces between: addresses and strides of whole vectors.
        num_warps: warps a program.
        num_stages: tiles that a loop of a program has under way.
        copied: bytes that one turn of its loops copies to shared memory at least, past the registers.
        spills: whether it may use more than the registers of a thread, which memory then stands in for.
        fp_fusion: whether `a * b + c` may become one fused instruction, which rounds once instead of twice.
    """

    kernel: Any
    types: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    multiples: str = ""
    num_warps: int = 4
    num_stages: int = 3
    copied: int = 0
    spills: bool = False
    fp_fusion: bool = True

    @property
    def signature(self) -> dict[str, str]:
        """Triton type by argument name."""
        types = {name: type_ for names, type_ in self.types.items() for name in names.split()}
        return types | dict.fromkeys(self.constexprs, "constexpr")

    @property
    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """What Triton is told of arguments, by their place."""
        return {(self.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in self.multiples.split()}
