"""Sums of rows by cluster, and the mean and the medoid of a cluster."""

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.clustering.tiles import tiles
from tiered.clustering.unit_rows import rounding
from tiered.kernels.directions import ZERO_NORM, normalised


def add_by_cluster(
    sums: Float32[Tensor, "groups clusters width"],
    rows: Float32[Tensor, "groups n width"],
    assignment: Int[Tensor, "groups n"],
) -> None:
    """`sums[g, assignment[g, i]] += rows[g, i]` in place; rows without a cluster must be zeros, assigned to any."""
    # On a device, `index_add_` adds with atomics in no fixed order, but offloaded states must equal resident ones bit
    # for bit. On the CPU it adds in order, and is several times faster than a matrix product.
    (_by_index if rows.device.type == "cpu" else _by_product)(sums, rows, assignment)


def _by_index(sums: Tensor, rows: Tensor, assignment: Tensor) -> None:
    groups, clusters, width = sums.shape
    offsets = torch.arange(0, groups * clusters, clusters, device=sums.device)[:, None]
    # `view` fails rather than copy `sums`, which would lose the result.
    sums.view(-1, width).index_add_(0, (assignment + offsets).flatten(), rows.flatten(0, 1))


def _by_product(sums: Tensor, rows: Tensor, assignment: Tensor) -> None:
    membership = rows.new_zeros(rows.shape[0], sums.shape[1], rows.shape[1])
    membership.scatter_(1, assignment[:, None], 1.0)
    sums.baddbmm_(membership, rows)


def nearest_members(
    cosine: Float[Tensor, "groups n"], assignment: Int[Tensor, "groups n"], clusters: int, apart: float
) -> Int[Tensor, "groups clusters"]:
    """The row of each cluster with the largest `cosine` to it, or the first that is within `apart` of that; n for a
    cluster without rows.

    `assignment`: −1 at rows without a cluster.
    """
    groups, n = cosine.shape
    slot = assignment % (clusters + 1)  # −1 becomes one more
    best = cosine.new_full((groups, clusters + 1), -torch.inf).scatter_reduce(1, slot, cosine, "amax")
    position = torch.arange(n, device=cosine.device).where(cosine >= best.gather(1, slot) - apart, n)
    first = assignment.new_full((groups, clusters + 1), n).scatter_reduce(1, slot, position, "amin")
    return first[:, :clusters]


def means_and_medoids(
    rows: Float[Tensor, "groups n width"], assignment: Int[Tensor, "groups n"], clusters: int
) -> tuple[Float32[Tensor, "groups clusters width"], Int[Tensor, "groups clusters"]]:
    """The mean of each cluster's rows, without normalisation, and its medoid. The medoid is the row with the largest
    cosine to the mean, or the first that equals it up to `rounding`.

    Rows with assignment −1 may have any values. A cluster without rows has mean 0 and medoid n. Takes two passes over
    the rows, without host synchronisation.
    """
    member = (assignment >= 0).float()
    cluster = assignment.clamp_min(0)
    sums = torch.zeros(rows.shape[0], clusters, rows.shape[2], dtype=torch.float32, device=rows.device)
    for here, span, tile in tiles(rows, member, gaps=True):
        add_by_cluster(sums[here], tile, cluster[here, span])
    counts = torch.zeros_like(sums[..., 0]).scatter_add_(1, cluster, member)
    means = sums / counts.clamp_min(1)[..., None]
    directions = normalised(means, torch.zeros_like(means))
    cosine = torch.empty_like(member)
    # Values of a row without a cluster affect only its own cosine, which is not used.
    for here, span, tile in tiles(rows, member, gaps=False, columns=clusters):
        along = (directions[here] @ tile.mT).gather(1, cluster[here, None, span]).squeeze(1)
        # A zero row has no direction: cosine 0, as 0 / ZERO_NORM is.
        cosine[here, span] = along / torch.linalg.vector_norm(tile, dim=-1).clamp_min(ZERO_NORM)
    return means, nearest_members(cosine, assignment, clusters, rounding(rows.dtype))
