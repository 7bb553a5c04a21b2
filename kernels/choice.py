"""Which implementation of an op runs: the Triton kernel on a CUDA device, otherwise the plain torch reference."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tiered.kernels.gate_mul_ref import gate_mul

P = ParamSpec("P")
R = TypeVar("R")


def for_device(reference: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """The implementation of the op `reference` (of a module `x_ref`) for `device`. On CUDA with triton installed it is
    the function of the same name and signature in module `x`; otherwise `reference` itself."""
    return _triton(reference) if runs_kernels(device) else reference


def runs_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and _has_triton()


def check_kernels(device: torch.device) -> None:
    """Compile and launch the smallest kernel on `device`, if kernels run there. Raises `OSError` if that fails, most
    often because a C compiler or Python.h is missing."""
    if not runs_kernels(device):
        return
    try:
        _launch_smallest(device)
    except Exception as error:
        raise OSError(
            f"Triton cannot compile and launch a kernel for {device} here ({type(error).__name__}: {error}). "
            "It needs a C compiler and Python's headers: install gcc and python3-dev (Python.h), or name the compiler "
            "in CC. Without the package triton, plain torch runs in place of kernels"
        ) from error


def _launch_smallest(device: torch.device) -> None:
    one = torch.ones(1, 1, device=device)
    _triton(gate_mul)(one, one).item()  # waits for the kernel, so that its failure is raised here


@functools.cache
def _triton(reference: Callable[P, R]) -> Callable[P, R]:
    module = importlib.import_module(reference.__module__.removesuffix("_ref"))
    return getattr(module, reference.__name__)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
