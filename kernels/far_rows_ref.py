"""The rows of highest rank for the empty clusters of k-means: the oracle, in plain torch."""

from jaxtyping import Bool, Float32, Int64
from torch import Tensor

# Ranks count as steps from the largest to 0, so that rows that should be equal rank alike.
STEPS = 64


def far_rows(
    rank: Float32[Tensor, "groups n"], empty: Bool[Tensor, "groups clusters"], apart: float
) -> Int64[Tensor, "groups clusters"]:
    """The row of the i-th highest rank for a group's i-th empty cluster, and any row for other clusters. Of ranks that
    differ by less than a step, or less than `apart`, the first row's counts as higher."""
    most = rank.amax(1, keepdim=True)
    order = (most - rank).floor_divide((most / STEPS).clamp_min(apart)).argsort(dim=1, stable=True)
    return order.gather(1, (empty.cumsum(1) - 1).clamp_min(0))
