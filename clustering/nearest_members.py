"""The member of each cluster that is most like it: its medoid."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def nearest_members(
    cosine: Float[Tensor, "groups n"], assignment: Int[Tensor, "groups n"], clusters: int, apart: float
) -> Int[Tensor, "groups clusters"]:
    """The row of each cluster with the largest `cosine` to it, the first of those that `apart` makes no difference to;
    n where a cluster has none.

    `assignment` is −1 at rows that belong nowhere.
    """
    groups, n = cosine.shape
    slot = assignment.where(assignment >= 0, clusters)
    best = cosine.new_full((groups, clusters + 1), -torch.inf).scatter_reduce(1, slot, cosine, "amax")
    position = torch.arange(n, device=cosine.device).where(cosine >= best.gather(1, slot) - apart, n)
    first = assignment.new_full((groups, clusters + 1), n).scatter_reduce(1, slot, position, "amin")
    return first[:, :clusters]
