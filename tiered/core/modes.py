"""The modes of torch that calls run in."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without gradients, and outside `torch.inference_mode`, whatever its caller is in: tensors of one call
    are written by the next, which may come from the other mode, and there torch refuses that."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call
