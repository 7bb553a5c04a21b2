"""The base of kernel cases: inputs that are drawn, the kernel's run, and results that it must give; and all cases.

All cases are those in `CHECKED` and `TIMED` of every module `kernel_cases_*`, in the order of its name.
"""

import importlib
import os
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

# Bounds of ‖found − true‖ / ‖true‖ by the dtype of results: half a step of the 16-bit formats, which is at least twice
# the error of random numbers rounded to nearest. float32 is rounded a few times on the way.
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True, kw_only=True)
class KernelCase(ABC):
    """One kernel at one size. Subclasses are frozen dataclasses, one for each kernel.

    Every call of `draw` gives inputs that share nothing with those of another, so that a few in turn are more than a
    cache holds. `moved` counts the least bytes: every input read once and every result written once.

    Attributes:
        triton: False for a kernel of torch's own.
        into: name of the input that the kernel writes into; "" if it makes its own results.
        error, roundings: ‖found − true‖ / ‖true‖ that rounding explains, and number of roundings to the dtype.
        of_rows: factor of that bound for a single row, along the last dimension.
    """

    kernel: ClassVar[str]
    triton: ClassVar[bool] = True
    into: ClassVar[str] = ""
    error: ClassVar[float] = 0.0
    roundings: ClassVar[int] = 0
    of_rows: ClassVar[int] = 2
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """The kernel, and fields that differ from their defaults."""
        own = {of.name: value for of in fields(self) if (value := getattr(self, of.name)) != of.default}
        words = [name if value is True else f"{name}={value}".replace("torch.", "") for name, value in own.items()]
        return " ".join([self.kernel, *words])

    @property
    def bound(self) -> float:
        """The largest ‖found − true‖ / ‖true‖ that rounding explains."""
        return max(self.error, self.roundings * ROUNDING[self.dtype])

    @abstractmethod
    def tiny(self) -> Self:
        """The case at a size of a few programs, for the interpreter and for the sanitizer."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Any:
        """Random inputs on the device of `generator`."""

    def room(self, given: Any) -> tuple[Tensor, ...]:
        """New memory for `run` to write into."""
        return (getattr(given, self.into).clone(),) if self.into else ()

    @abstractmethod
    def run(self, given: Any, room: Sequence[Tensor]) -> Sequence[Tensor]:
        """Start the kernel as the runtime does, and return its results."""

    def law(self, given: Any) -> Sequence[Tensor] | None:
        """The results, bit for bit; None if rounding may differ."""
        return None

    def truth(self, given: Any) -> Sequence[Tensor]:
        """The numbers that `seen` must give, by the definition and in float64."""
        return [result.double() for result in self.law(given) or ()]

    def seen(self, given: Any, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """The numbers that `results` stand for."""
        return results

    @abstractmethod
    def moved(self, given: Any) -> int:
        """Bytes that the kernel moves at least."""

    def arithmetic(self, given: Any) -> int:
        """Floating-point operations of the matrix products, each once; 0 without products."""
        return 0


@cache
def found(table: str) -> tuple[KernelCase, ...]:
    """All cases of "CHECKED" or "TIMED"."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("kernel_cases_*.py"))
    return tuple(case for name in names for case in getattr(importlib.import_module(f"gpu_parts.{name}"), table))


def sized(table: str, tiny: bool) -> dict[str, KernelCase]:
    """All cases by their names at full size, so that a rehearsal and a day have the same rows."""
    return {case.name: case.tiny() if tiny else case for case in found(table)}


def small_cases() -> dict[str, KernelCase]:
    """The first case of every Triton kernel, tiny, by the kernel's name."""
    return {case.kernel: case.tiny() for case in reversed(found("CHECKED")) if case.triton}


def run_once(case: KernelCase, device: torch.device) -> None:
    """Run the case on random inputs, and wait. It checks nothing."""
    interpret(device)
    given = case.draw(generator_of(case.name, 0, device))
    case.run(given, case.room(given))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """A generator for one case, whose draws do not depend on other cases."""
    return torch.Generator(device).manual_seed(seed + zlib.crc32(name.encode()))


def op(name: str, function: str | None = None) -> Callable[..., Any]:
    """A function of a kernel's module; None for the function of the module's name. The module is imported now, so
    `interpret` must have been called before."""
    return getattr(importlib.import_module(f"tiered.kernels.{name}"), function or name)


def interpret(device: torch.device) -> None:
    """Have Triton interpret its kernels if `device` cannot run them.

    Raises:
        RuntimeError: Triton was imported before, without its interpreter.
    """
    if device.type == "cuda":
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before it could be told to interpret: TRITON_INTERPRET=1 is needed")
    os.environ["TRITON_INTERPRET"] = "1"


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Independent standard normal numbers."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def random_bytes(generator: torch.Generator, *shape: int, below: int = 256) -> Tensor:
    """Random numbers below `below`; uint8."""
    return torch.randint(below, shape, generator=generator, device=generator.device, dtype=torch.uint8)


def shuffled(generator: torch.Generator, count: int) -> Tensor:
    """The numbers below `count` in random order; int64."""
    return torch.randperm(count, generator=generator, device=generator.device)


def size(*tensors: Tensor | None) -> int:
    """Bytes of tensors, each element once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
