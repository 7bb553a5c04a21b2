"""What stands for a cluster: the mean of its rows, and the member nearest to that."""

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.clustering.cluster_sums import add_by_cluster
from tiered.clustering.nearest_members import nearest_members
from tiered.clustering.tiles import tiles
from tiered.clustering.unit_rows import ZERO_NORM, normalised, rounding


def means_and_medoids(
    rows: Float[Tensor, "groups n width"], assignment: Int[Tensor, "groups n"], clusters: int
) -> tuple[Float32[Tensor, "groups clusters width"], Int[Tensor, "groups clusters"]]:
    """The mean of each cluster's rows as they are, and the row with the largest cosine to it, the first of those
    that rounding may have told apart (`rounding`).

    Rows with assignment −1 may hold anything. A cluster without rows has mean 0 and medoid n. Two passes over the rows,
    no host synchronisation.
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
    for here, span, tile in tiles(rows, member, gaps=True, columns=clusters):
        along = (tile @ directions[here].mT).gather(2, cluster[here, span, None]).squeeze(2)
        # A zero row has no direction: cosine 0, as 0 / ZERO_NORM is.
        cosine[here, span] = along / torch.linalg.vector_norm(tile, dim=-1).clamp_min(ZERO_NORM)
    return means, nearest_members(cosine, assignment, clusters, rounding(rows.dtype))
