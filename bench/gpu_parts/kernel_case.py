"""What a kernel case is: how inputs are drawn, how the kernel is run over them, and what it must give."""

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

Given = TypeVar("Given")

# Of ‖found − true‖ / ‖true‖, for results rounded to these: half a step of the 16-bit formats, which is twice and more
# what rounding to nearest makes of random numbers; float32 is rounded a few times on the way.
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class KernelCase(ABC, Generic[Given]):
    """One kernel at one size. Subclasses are frozen dataclasses, one for each kernel; `triton`: not one of torch's own.

    Every call of `draw` gives inputs that share nothing with those of another, so that a few in turn are more than a
    cache holds. What `moved` counts is the least: every input read once and every result written once.
    """

    kernel: ClassVar[str]
    triton: ClassVar[bool] = True

    @property
    @abstractmethod
    def name(self) -> str:
        """Kernel and sizes."""

    @property
    @abstractmethod
    def bound(self) -> float:
        """The largest ‖found − true‖ / ‖true‖ that rounding explains."""

    @property
    def row_bound(self) -> float:
        """The same of a single row, along the last dimension."""
        return 2 * self.bound

    @abstractmethod
    def tiny(self) -> Self:
        """The same at a size of a few programs, for the interpreter and for the sanitizer."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Given:
        """Random inputs on the device of `generator`."""

    def room(self, given: Given) -> tuple[Tensor, ...]:
        """What `run` writes into, a new one with each call; nothing where the kernel makes its own results."""
        return ()

    @abstractmethod
    def run(self, given: Given, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Start the kernel as the runtime does, and return its results."""

    @abstractmethod
    def truth(self, given: Given) -> tuple[Tensor, ...]:
        """What `seen` must be, by the definition and in float64."""

    def seen(self, given: Given, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The numbers that `results` stand for."""
        return tuple(results)

    def law(self, given: Given) -> tuple[Tensor, ...] | None:
        """What the results must be, bit for bit; None where rounding may differ."""
        return None

    @abstractmethod
    def moved(self, given: Given) -> int:
        """Bytes."""

    def arithmetic(self, given: Given) -> int:
        """Floating-point operations of the matrix products, each once; 0 where there are none."""
        return 0


def op(name: str) -> Callable[..., Any]:
    """The function of a kernel's module, which is imported here and now: `interpret` must have been called before."""
    return getattr(importlib.import_module(f"tiered.kernels.{name}"), name)


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


def dtype_name(dtype: torch.dtype) -> str:
    """Without the prefix of torch."""
    return str(dtype).removeprefix("torch.")
