"""Iterates over many rows in float32, without a float32 copy of all."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

# Elements of a tile. On the CPU 4 MiB, which fits the caches between the passes over a tile. On a device 64 MiB, which
# is enough work for one launch, and is k-means's only working memory beside its results.
CPU_ELEMENTS = 1 << 20
DEVICE_ELEMENTS = 1 << 24


def tiles(
    rows: Float[Tensor, "groups n width"], scale: Float[Tensor, "groups n"], *, gaps: bool, columns: int = 1
) -> Iterator[tuple[slice, slice, Tensor]]:
    """`rows · scale`, a few groups and a span of rows at a time: (groups, rows, float32 tile).

    The next tile reuses a tile's memory. The number of rows of a tile does not depend on the number of groups.

    Args:
        rows: rows in float16, bfloat16, float32 or float64.
        scale: factor of each row, float32.
        gaps: whether rows of scale 0 may have any values, NaN included, and become zeros.
        columns: numbers that the caller computes for each row, which then fit the size of a tile too.
    """
    groups, n, width = rows.shape
    elements = CPU_ELEMENTS if rows.device.type == "cpu" else DEVICE_ELEMENTS
    row_elements = max(width, columns)
    tall = max(1, min(n, elements // row_elements))
    many = max(1, min(groups, elements // (tall * row_elements)))
    buffer = torch.empty(many * tall * width, dtype=torch.float32, device=rows.device)
    for first_group in range(0, groups, many):
        here = slice(first_group, min(first_group + many, groups))
        for first_row in range(0, n, tall):
            span = slice(first_row, min(first_row + tall, n))
            part = rows[here, span]
            factor = scale[here, span, None]
            tile = torch.mul(part, factor, out=buffer[: part.numel()].view(part.shape))
            if gaps:
                tile.masked_fill_(factor == 0, 0)
            yield here, span, tile
