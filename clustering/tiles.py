"""Going through many rows in float32 without a float32 copy of them all."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

# Elements of a tile. On the CPU 4 MiB, which the caches hold between the passes over a tile; on a device 64 MiB, which
# is enough work for one launch and is all the working memory that k-means takes beside its results.
CPU_ELEMENTS = 1 << 20
DEVICE_ELEMENTS = 1 << 24


def tiles(
    rows: Float[Tensor, "groups n width"], scale: Float[Tensor, "groups n"], *, gaps: bool, columns: int = 1
) -> Iterator[tuple[slice, slice, Tensor]]:
    """`rows · scale`, a few groups and a span of rows at a time: (groups, rows, float32 tile).

    A tile lies in memory that the next one reuses. How many rows it has does not depend on the number of groups.

    Args:
        rows: float16, bfloat16, float32 or float64.
        scale: float32.
        gaps: rows of scale 0 may hold anything, NaN included, and become zeros.
        columns: the caller makes as many numbers of each row; they are kept to the size of a tile too.
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
