"""Specialisations of the Triton kernels, which CI compiles ahead of time on a machine without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One specialisation of a kernel, as its launcher requests it.

    A module beside this one lists those of `kernels/x.py` in `COMPILATIONS`, the one with the most features first for
    each kernel. tests/test_compilation.py compiles the first ones in short, and all for every architecture in long.

    Attributes:
        kernel: the `@triton.jit` function.
        types: Triton type (`"*u8"`, `"i32"`, `"fp32"`) by names of arguments, spaces between.
        constexprs: value by name of each constexpr argument; an argument of `types` may be among them.
        multiples: names of arguments that are multiples of 16, spaces between: addresses and strides of whole vectors.
        num_warps: warps of a program.
        num_stages: tiles that a loop of a program has under way.
        copied: least bytes that one turn of its loops copies to shared memory past the registers.
        byte_loads: most loads of one byte from global memory, a number that may only fall. Flags are bytes; of codes
            and their scales, whole words are loaded.
        spills: True if registers may spill to memory.
        fp_fusion: True if `a * b + c` may become one fused instruction, which rounds once instead of twice.
    """

    kernel: Any
    types: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    multiples: str = ""
    num_warps: int = 4
    num_stages: int = 3
    copied: int = 0
    byte_loads: int = 0
    spills: bool = False
    fp_fusion: bool = True

    @property
    def signature(self) -> dict[str, str]:
        """Triton type by argument name."""
        types = {name: type_ for names, type_ in self.types.items() for name in names.split()}
        return types | dict.fromkeys(self.constexprs, "constexpr")

    @property
    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """Triton's facts on arguments, by their place."""
        return {(self.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in self.multiples.split()}
