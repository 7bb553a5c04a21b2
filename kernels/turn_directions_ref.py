"""Turn each cluster's direction to the sum of its rows, or of an empty cluster to a row: the oracle, in plain torch."""

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from tiered.kernels.directions import normalised, scaled_rows


def turn_directions(
    directions: Float32[Tensor, "groups clusters width"],
    sums: Float32[Tensor, "groups clusters width"],
    empty: Bool[Tensor, "groups clusters"],
    picks: Int64[Tensor, "groups clusters"],
    rows: Float[Tensor, "groups n width"],
    inverse: Float32[Tensor, "groups n"],
) -> Float32[Tensor, "groups clusters width"]:
    """`sums` at unit norm, or `rows · inverse` at the picks of `empty` clusters. If that vector has no direction, the
    cluster keeps its own in `directions`."""
    return normalised(torch.where(empty[..., None], scaled_rows(rows, inverse, picks), sums), directions)
