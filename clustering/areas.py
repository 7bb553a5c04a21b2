"""Clusters of hidden rows before and after the current block."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.clustering.allocation import allocate_clusters, auto_clusters, cut_sizes
from tiered.clustering.cluster_index import ClusterIndex
from tiered.clustering.faiss_backend import Backend
from tiered.clustering.kmeans import kmeans
from tiered.clustering.summaries import means_and_medoids
from tiered.clustering.unit_rows import UnitRows

Span = tuple[int, int]


@torch.no_grad()
def cluster_areas(
    hidden: Float[Tensor, "groups length width"],
    areas: tuple[Span, Span],
    clusters: int | Literal["auto"] = "auto",
    *,
    valid: Bool[Tensor, "groups length"] | None = None,
    iterations: int = 10,
    seed: int = 0,
    backend: Backend = "torch",
) -> list[ClusterIndex]:
    """Cluster every group (a layer of a sequence), prefix and suffix separately.

    Clusters of the prefix are numbered first, then those of the suffix. Groups with equal shares are clustered
    together. The host reads from the device twice: before the work, whether all rows are finite and how many are valid,
    and after it the sizes and members of all clusters.

    Args:
        hidden: rows of the canvas; rows outside the areas and invalid rows may have any values.
        areas: columns (start, stop) of prefix and suffix; stop is exclusive, either may be empty.
        clusters: number of clusters of a group, shared between its areas by their valid rows (`allocate_clusters`);
            "auto" for about one per 64 valid rows. With as many clusters as rows, each has one row, in the order of
            rows.
        valid: False at padding; None if all rows are valid.
        iterations, seed, backend: see `kmeans`.

    Raises:
        ValueError: a number of clusters that a group cannot have, or a valid row that is not finite or whose norm
            exceeds float32.
        ImportError: backend "faiss" without faiss.
    """
    units, rows = _look(hidden, areas, valid)
    shares = [allocate_clusters(auto_clusters(*counts) if clusters == "auto" else clusters, *counts) for counts in rows]
    assignment = torch.full(hidden.shape[:2], -1, dtype=torch.int64, device=hidden.device)
    for area, (first, stop) in enumerate(areas):
        # Groups by number of clusters, by number of the first one, and by whether each cluster has one row.
        calls: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
        for group, share in enumerate(shares):
            if share[area]:
                calls[share[area], sum(share[:area]), share[area] == rows[group][area]].append(group)
        for (count, offset, single), members in calls.items():
            part, whole = _selector(members), all(rows[group][area] == stop - first for group in members)
            some = units.part(part, slice(first, stop), whole=whole)
            found = some.numbers() if single else kmeans(some, count, iterations=iterations, seed=seed, backend=backend)
            assignment[part, first:stop] = found + offset if whole else found.where(found < 0, found + offset)
    return _indices(hidden, assignment, shares)


@torch.no_grad()
def cut_clusters(
    hidden: Float[Tensor, "groups length width"], indices: Sequence[ClusterIndex], most_rows: int
) -> list[ClusterIndex]:
    """Split clusters of more than `most_rows` members in `indices`, one index for each group.

    This bounds the work and the memory of an update, because k-means may put all rows of masks, which are alike, into
    one cluster. The host sends the new sizes to the device, and reads nothing from it.
    """
    if all(size <= most_rows for index in indices for size in index.sizes):
        return list(indices)
    cut = [replace(index, sizes=cut_sizes(index.sizes, most_rows)) for index in indices]
    assignment = torch.stack([index.cluster_of(hidden.shape[1]) for index in cut])
    most = max(1, *(index.clusters for index in cut))
    centroids, medoids = means_and_medoids(hidden, assignment, most)
    return [
        replace(
            index,
            centroids=centroids[group, : index.clusters].to(hidden.dtype, copy=True),
            medoids=medoids[group, : index.clusters].clone(),
        )
        for group, index in enumerate(cut)
    ]


def _look(
    hidden: Float[Tensor, "groups length width"],
    areas: tuple[Span, Span],
    valid: Bool[Tensor, "groups length"] | None,
) -> tuple[UnitRows, list[tuple[int, int]]]:
    """The rows of the areas as directions, and the number of valid rows in each group's prefix and suffix. Reads from
    the device once."""
    clustered = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    for first, stop in areas:
        clustered[:, first:stop] = True
    if valid is not None:
        clustered &= valid
    units = UnitRows.of(hidden, clustered)
    counts = torch.stack([clustered[:, first:stop].sum(1) for first, stop in areas], dim=1)
    finite, *rows = torch.cat([units.finite.long()[None], counts.flatten()]).tolist()
    if not finite:
        raise ValueError("a valid row is not finite, or its norm exceeds float32")
    return units, list(zip(rows[::2], rows[1::2], strict=True))


def _selector(groups: list[int]) -> slice | list[int]:
    """`groups` (ascending) as a slice if they are evenly spaced, so that their hidden rows are a view, not a copy."""
    step = groups[1] - groups[0] if len(groups) > 1 else 1
    evenly = list(range(groups[0], groups[-1] + 1, step)) == groups
    return slice(groups[0], groups[-1] + 1, step) if evenly else groups


def _indices(
    hidden: Float[Tensor, "groups length width"],
    assignment: Int[Tensor, "groups length"],
    shares: list[tuple[int, int]],
) -> list[ClusterIndex]:
    most = max(1, *map(sum, shares))
    centroids, medoids = means_and_medoids(hidden, assignment, most)
    slot = assignment % (most + 1)  # −1 becomes one more
    order = slot.argsort(dim=1, stable=True)
    counts = slot.new_zeros(len(shares), most + 1).scatter_add_(1, slot, torch.ones_like(slot))
    # Sizes, and columns in order.
    table = torch.cat([counts, order], dim=1).tolist()
    found = [(values[: sum(share)], values[most + 1 :]) for values, share in zip(table, shares, strict=True)]
    return [
        # Copies of exact size, because an index must not keep the other groups' memory alive.
        ClusterIndex(
            rows=order[group, : sum(sizes)].clone(),
            columns=columns[: sum(sizes)],
            sizes=tuple(sizes),
            centroids=centroids[group, : len(sizes)].to(hidden.dtype, copy=True),
            medoids=medoids[group, : len(sizes)].clone(),
        )
        for group, (sizes, columns) in enumerate(found)
    ]
