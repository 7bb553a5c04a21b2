"""Launches of Triton kernels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PROGRAMS = 264  # that run at a time: two for each multiprocessor of an H100
VECTOR = 16  # most bytes that a thread loads or stores at once


def power_of_2(count: int) -> int:
    """The least power of 2 that is not below `count`, which is positive. Triton's own function is meant for kernels,
    and takes the host ten times as long."""
    return 1 << (count - 1).bit_length()


class RowTile(NamedTuple):
    """Rows of a program, and elements of each of them; powers of two."""

    rows: int
    elements: int


def row_tile(elements: int, most: int) -> RowTile:
    """The tile of rows of `elements`: as many rows as have `most` elements together, at least one."""
    block = power_of_2(elements)
    return RowTile(max(1, most // block), block)


def warps_of_row(block: int) -> int:
    """Warps of a program that has a row of `block` elements, one for 512: a thread has 16 of them in registers."""
    return min(max(block // 512, 1), 32)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, on: Tensor, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)` on the current stream of the device of `on`, whichever device is current.

    Kernels are untyped here: Triton types one as the Python function in its source, so type checkers would reject
    options such as `num_warps`.
    """
    with torch.cuda.device_of(on):
        kernel[grid](*arguments, **options)
