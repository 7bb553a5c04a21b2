"""Turn each cluster's direction to the sum of its rows, or of an empty cluster to a row, in Triton: a program a
cluster."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from tiered.kernels.directions import ZERO_NORM
from tiered.kernels.launch import launch, power_of_2, warps_of_row


@triton.jit(
    do_not_specialize=["clusters", "row_group", "row_step", "inverse_group"],
    do_not_specialize_on_alignment=["rows", "inverse"],  # they begin at some column of a canvas
)
def _turn_directions(
    directions, summed, empty, picks, rows, inverse, turned,
    clusters, width, row_group, row_step, inverse_group, least, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    cluster = group * clusters + tl.program_id(0)
    element = tl.arange(0, BLOCK)
    inside = element < width
    at = cluster * width + element
    if tl.load(empty + cluster) != 0:
        pick = tl.load(picks + cluster)
        own = rows + group * row_group + pick * row_step
        vector = tl.load(own + element, inside, other=0.0).to(tl.float32)
        vector *= tl.load(inverse + group * inverse_group + pick)
    else:
        vector = tl.load(summed + at, inside, other=0.0)
    norm = tl.sqrt_rn(tl.sum(vector * vector, 0))
    vector = tl.div_rn(vector, norm) if norm > least else tl.load(directions + at, inside, other=0.0)
    tl.store(turned + at, vector, inside)


def turn_directions(
    directions: Float32[Tensor, "groups clusters width"],
    sums: Float32[Tensor, "groups clusters width"],
    empty: Bool[Tensor, "groups clusters"],
    picks: Int64[Tensor, "groups clusters"],
    rows: Float[Tensor, "groups n width"],
    inverse: Float32[Tensor, "groups n"],
) -> Float32[Tensor, "groups clusters width"]:
    """As in turn_directions_ref.py."""
    groups, clusters, width = directions.shape
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    inverse = inverse if inverse.stride(1) == 1 else inverse.contiguous()
    turned = sums.new_empty(directions.shape)
    of_clusters = directions.contiguous(), sums.contiguous(), empty.contiguous().view(torch.uint8), picks.contiguous()
    counts = clusters, width, *rows.stride()[:2], inverse.stride(0), ZERO_NORM
    block = power_of_2(width)
    options = {"BLOCK": block, "num_warps": warps_of_row(block)}
    launch(_turn_directions, (clusters, groups), *of_clusters, rows, inverse, turned, *counts, **options, on=sums)
    return turned
