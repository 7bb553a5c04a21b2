"""What a kernel case is: how inputs are drawn, how the kernel is run over them, what it must give; and all of them.

They are found: `CHECKED` and `TIMED` of every module `kernel_cases_*`, in the order of its name.
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

# Of ‖found − true‖ / ‖true‖, for results rounded to these: half a step of the 16-bit formats, which is twice and more
# what rounding to nearest makes of random numbers; float32 is rounded a few times on the way.
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True, kw_only=True)
class KernelCase(ABC):
    """One kernel at one size. Subclasses are frozen dataclasses, one for each kernel.

    Every call of `draw` gives inputs that share nothing with those of another, so that a few in turn are more than a
    cache holds. What `moved` counts is the least: every input read once and every result written once.

    Attributes:
        triton: not one of torch's own.
        into: name of what `draw` gives that the kernel writes into; "": it makes its own results.
        error, roundings: what rounding explains of ‖found − true‖ / ‖true‖: so much, or so many roundings to the dtype.
        of_rows: how much more of a single row, along the last dimension.
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
        """The kernel and what is set of its sizes."""
        own = {of.name: value for of in fields(self) if (value := getattr(self, of.name)) != of.default}
        words = [name if value is True else f"{name}={value}".replace("torch.", "") for name, value in own.items()]
        return " ".join([self.kernel, *words])

    @property
    def bound(self) -> float:
        """The largest ‖found − true‖ / ‖true‖ that rounding explains."""
        return max(self.error, self.roundings * ROUNDING[self.dtype])

    @abstractmethod
    def tiny(self) -> Self:
        """The same at a size of a few programs, for the interpreter and for the sanitizer."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Any:
        """Random inputs on the device of `generator`."""

    def room(self, given: Any) -> tuple[Tensor, ...]:
        """What `run` writes into, a new one with each call."""
        return (getattr(given, self.into).clone(),) if self.into else ()

    @abstractmethod
    def run(self, given: Any, room: Sequence[Tensor]) -> Sequence[Tensor]:
        """Start the kernel as the runtime does, and return its results."""

    def law(self, given: Any) -> Sequence[Tensor] | None:
        """What the results must be, bit for bit; None where rounding may differ."""
        return None

    def truth(self, given: Any) -> Sequence[Tensor]:
        """What `seen` must be, by the definition and in float64."""
        return [result.double() for result in self.law(given) or ()]

    def seen(self, given: Any, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """The numbers that `results` stand for."""
        return results

    @abstractmethod
    def moved(self, given: Any) -> int:
        """Bytes."""

    def arithmetic(self, given: Any) -> int:
        """Floating-point operations of the matrix products, each once; 0 where there are none."""
        return 0


@cache
def found(table: str) -> tuple[KernelCase, ...]:
    """All cases of "CHECKED" or "TIMED"."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("kernel_cases_*.py"))
    return tuple(case for name in names for case in getattr(importlib.import_module(f"gpu_parts.{name}"), table))


def sized(table: str, tiny: bool) -> dict[str, KernelCase]:
    """By the name at full size, so that a rehearsal and a day have the same rows."""
    return {case.name: case.tiny() if tiny else case for case in found(table)}


def small_cases() -> dict[str, KernelCase]:
    """The first case of every Triton kernel, tiny, by the kernel's name."""
    return {case.kernel: case.tiny() for case in reversed(found("CHECKED")) if case.triton}


def run_once(case: KernelCase, device: torch.device) -> None:
    """On random inputs, and wait. It checks nothing."""
    interpret(device)
    given = case.draw(generator_of(case.name, 0, device))
    case.run(given, case.room(given))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Draws of one case: they do not depend on which others run."""
    return torch.Generator(device).manual_seed(seed + zlib.crc32(name.encode()))


def op(name: str, function: str | None = None) -> Callable[..., Any]:
    """A function of a kernel's module, the one of its name for None. The module is imported here and now: `interpret`
    must have been called before."""
    return getattr(importlib.import_module(f"tiered.kernels.{name}"), function or name)


def interpret(device: torch.device) -> None:
    """Have Triton interpret its kernels where `device` can run none.

    Raises:
        RuntimeError: Triton was imported without that.
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
    """uint8."""
    return torch.randint(below, shape, generator=generator, device=generator.device, dtype=torch.uint8)


def shuffled(generator: torch.Generator, count: int) -> Tensor:
    """The numbers below `count` in some order; int64."""
    return torch.randperm(count, generator=generator, device=generator.device)


def size(*tensors: Tensor | None) -> int:
    """Bytes of tensors, each element once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
