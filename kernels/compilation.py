"""What CI compiles of a Triton kernel ahead of time, on a machine without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One specialisation of a kernel, as its launcher would ask for it. Every module `x.py` lists its own in
    `COMPILATIONS`; tests/test_compilation.py compiles them all for sm_90.

    Attributes:
        kernel: the `@triton.jit` function.
        signature: Triton type by argument name (`"*u8"`, `"i32"`, `"fp32"`, `"constexpr"`).
        constexprs: value by name of each constexpr argument.
        num_warps: warps a program.
        spills: whether it may use more than the registers of a thread, which memory then stands in for.
        fp_fusion: whether `a * b + c` may become one fused instruction, which rounds once instead of twice.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    spills: bool = False
    fp_fusion: bool = True
