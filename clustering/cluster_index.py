"""The clusters of one layer of one sequence: their members in order, their centroids and their medoids."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.kernels.host_values import on_device


@dataclass(frozen=True, slots=True, eq=False)
class ClusterIndex:
    """Clusters over some columns of a canvas. Immutable: a change makes a new index.

    Attributes:
        rows: canvas columns in cluster-major order, ascending within a cluster.
        columns: `rows` on the host, because books list the members.
        sizes: number of members of each cluster, at least one; on the host, because they determine the sizes of
            records.
        centroids: mean of each cluster's rows, not normalised, because residuals are taken against it.
        medoids: canvas column of the member nearest (cosine) to the centroid when the clusters were made.
    """

    rows: Int[Tensor, " n"]
    columns: list[int]
    sizes: tuple[int, ...]
    centroids: Float[Tensor, "clusters width"]
    medoids: Int[Tensor, " clusters"]

    @property
    def clusters(self) -> int:
        return len(self.sizes)

    def cluster_of(self, length: int) -> Int[Tensor, " length"]:
        """The cluster of every column of a canvas of length `length`; −1 for no cluster."""
        device = self.rows.device
        clusters = torch.from_numpy(np.repeat(np.arange(self.clusters), self.sizes))
        return torch.full((length,), -1, device=device).scatter_(0, self.rows, on_device(clusters, device))
