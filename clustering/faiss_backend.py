"""The iterations of spherical k-means by faiss, on the CPU, one group after the other."""

from typing import Literal

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from tiered.clustering.unit_rows import UnitRows, first_alike
from tiered.kernels.directions import normalised

Backend = Literal["torch", "faiss"]

UNLIMITED = 1 << 30


def faiss_lloyd(
    units: UnitRows, start: Float32[Tensor, "groups clusters width"], iterations: int
) -> tuple[Int64[Tensor, "groups n"], Float32[Tensor, "groups n"]]:
    """`tiered.clustering.kmeans.lloyd` by faiss, on a copy of all rows on the CPU. Raises `ImportError` without faiss.

    Results differ after an empty cluster, which faiss fills with half of a large one, and `lloyd` with the farthest
    row.
    """
    groups, n, _ = units.rows.shape
    nearest = torch.zeros(groups, n, dtype=torch.int64)
    cosine = torch.zeros(groups, n, dtype=torch.float32)
    for group in range(groups):
        one = units.part(slice(group, group + 1))
        columns = torch.arange(n) if one.valid is None else one.valid[0].nonzero()[:, 0].cpu()
        rows = one.take(columns[None].to(start.device))[0].cpu()
        directions = _train(rows, start[group].cpu(), iterations)
        cosine[group, columns], found = _search(rows, directions)
        nearest[group, columns] = first_alike(directions[None], units.rounding)[0][found]
    return nearest.to(start.device), cosine.to(start.device)


def _train(rows: Float32[Tensor, "n width"], start: Float32[Tensor, "clusters width"], iterations: int) -> Tensor:
    import faiss

    clusters, width = start.shape
    training = faiss.Clustering(width, clusters)
    training.niter = iterations
    training.spherical = True  # normalises only the centroids; `rows` are unit rows already
    training.max_points_per_centroid = UNLIMITED  # by default faiss trains on a sample of 256 rows a cluster
    training.min_points_per_centroid = 1  # by default it warns on stderr below 39
    training.early_stop_threshold = -1.0  # all iterations
    training.check_input_data_for_NaNs = False  # the caller has checked
    faiss.copy_array_to_vector(start.numpy().ravel(), training.centroids)
    training.train(rows.numpy(), faiss.IndexFlatIP(width))
    found = torch.from_numpy(faiss.vector_to_array(training.centroids)).view(1, clusters, width)
    # The centroid of a cluster of zero rows is a zero vector.
    return normalised(found, start[None])[0]


def _search(rows: Float32[Tensor, "n width"], directions: Float32[Tensor, "clusters width"]) -> tuple[Tensor, Tensor]:
    import faiss

    index = faiss.IndexFlatIP(directions.shape[1])
    index.add(directions.numpy())
    cosine, nearest = index.search(rows.numpy(), 1)
    return torch.from_numpy(cosine)[:, 0], torch.from_numpy(nearest)[:, 0]
