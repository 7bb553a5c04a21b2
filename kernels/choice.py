"""Which implementation of an op runs: the Triton kernel on a CUDA device, the plain torch reference everywhere else."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def for_device(reference: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """The op `reference` (of a module `x_ref`) as it runs on `device`: the function of its name in module `x`, which
    has the same signature, on CUDA with triton installed; else `reference` itself."""
    return _triton(reference) if device.type == "cuda" and _has_triton() else reference


@functools.cache
def _triton(reference: Callable[P, R]) -> Callable[P, R]:
    module = importlib.import_module(reference.__module__.removesuffix("_ref"))
    return getattr(module, reference.__name__)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
