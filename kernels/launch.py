"""How Triton kernels are started."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

VECTOR = 16  # bytes that a thread loads or stores at once, at most


class RowTile(NamedTuple):
    """Rows of a program, and elements of each of them; powers of two."""

    rows: int
    elements: int


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, on: Tensor, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)` on the current stream of the device of `on`, whichever device is current.

    Triton types a kernel as the Python function that it is written as, so no type checker can know what may be passed
    to it, `num_warps` for one; here is the place where that is given up.
    """
    with torch.cuda.device_of(on):
        kernel[grid](*arguments, **options)
