"""The clusters of one layer of one sequence: their members in order, their centroids and their medoids."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ClusterIndex:
    """Clusters over some columns of a canvas. Nothing here is ever written again: a change makes a new index.

    Attributes:
        rows: canvas columns in cluster-major order: a cluster's members follow each other, ascending.
        sizes: members of each cluster, at least one. On the host, since they decide the sizes of records.
        counts: the same on the device, since a copy from the host would wait for what the device is doing.
        shares: clusters of each area of the canvas (prefix, suffix), in the order of their numbers.
        centroids: mean of each cluster's rows as they are, not of unit norm: residuals are taken against it.
        medoids: canvas column of the member nearest (cosine) to the centroid when the clusters were made.
    """

    rows: Int[Tensor, " n"]
    sizes: tuple[int, ...]
    counts: Int[Tensor, " clusters"]
    shares: tuple[int, ...]
    centroids: Float[Tensor, "clusters width"]
    medoids: Int[Tensor, " clusters"]

    @property
    def clusters(self) -> int:
        return len(self.sizes)

    def cluster_of(self, length: int) -> Int[Tensor, " length"]:
        """The cluster of every column of a canvas of `length` columns, −1 where there is none."""
        device = self.rows.device
        clusters = torch.arange(self.clusters, device=device).repeat_interleave(self.counts, output_size=len(self.rows))
        return torch.full((length,), -1, device=device).scatter_(0, self.rows, clusters)
