"""The rows of highest rank for the empty clusters of k-means, in Triton: a program a group, which sorts nothing.

It goes through the ranks once for each step down in which it finds a row, until there are enough. Most often no cluster
is empty, and it reads no rank.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from tiered.kernels.far_rows_ref import STEPS
from tiered.kernels.launch import launch

TILE = 1024  # rows or clusters at a time
WARPS = 4


@triton.jit(do_not_specialize=["rows", "clusters"])
def _far_rows(rank, empty, order, picks, rows, clusters, share, apart, TILE: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    item = tl.arange(0, TILE)
    wanted = tl.sum(item * 0, 0)
    for first in range(0, clusters, TILE):
        cluster = first + item
        wanted += tl.sum(tl.load(empty + group * clusters + cluster, cluster < clusters, other=0).to(tl.int32), 0)
    if wanted > 0:
        most = tl.load(rank + group * rows)
        for first in range(0, rows, TILE):
            row = first + item
            most = tl.maximum(most, tl.max(tl.load(rank + group * rows + row, row < rows, other=-float("inf")), 0))
        step = tl.maximum(most * share, apart).to(tl.float64)
        found, down, following = wanted * 0, step * 0, step * 0
        while (found < wanted) & (down < float("inf")):
            following = step * 0 + float("inf")
            for first in range(0, rows, TILE):
                row = first + item
                # The quotient of two float32 in float64 is never rounded up to a whole number.
                own = tl.load(rank + group * rows + row, row < rows, other=0.0)
                below = tl.floor((most - own).to(tl.float64) / step)
                here = (row < rows) & (below == down)
                place = found + tl.cumsum(here.to(tl.int32), 0) - 1
                tl.store(order + group * clusters + place, row.to(tl.int64), here & (place < wanted))
                found += tl.sum(here.to(tl.int32), 0)
                further = tl.where((row < rows) & (below > down), below, float("inf"))
                following = tl.minimum(following, tl.min(further, 0))
            down = following
        tl.debug_barrier()  # other threads of the program have written the order
    seen = wanted * 0
    for first in range(0, clusters, TILE):
        cluster = first + item
        flag = tl.load(empty + group * clusters + cluster, cluster < clusters, other=0).to(tl.int32)
        place = seen + tl.cumsum(flag, 0) - 1
        pick = tl.load(order + group * clusters + place, flag != 0, other=0)
        tl.store(picks + group * clusters + cluster, pick, cluster < clusters)
        seen += tl.sum(flag, 0)


def far_rows(
    rank: Float32[Tensor, "groups n"], empty: Bool[Tensor, "groups clusters"], apart: float
) -> Int64[Tensor, "groups clusters"]:
    """As in far_rows_ref.py."""
    (groups, rows), clusters = rank.shape, empty.shape[1]
    order, picks = (rank.new_empty(groups, clusters, dtype=torch.int64) for _ in range(2))
    given = rank.contiguous(), empty.contiguous().view(torch.uint8), order, picks, rows, clusters, 1 / STEPS, apart
    launch(_far_rows, (groups,), *given, TILE=TILE, num_warps=WARPS, on=rank)
    return picks
