"""Spherical k-means for many groups at once, by torch or by faiss: clusters of rows by direction."""

import torch
from jaxtyping import Float32, Int, Int64
from torch import Tensor
from torch.nn.functional import pad

from tiered.clustering.faiss_backend import Backend, faiss_lloyd
from tiered.clustering.seeding import kmeans_start
from tiered.clustering.summaries import add_by_cluster, nearest_members
from tiered.clustering.unit_rows import UnitRows, first_alike
from tiered.kernels.choice import for_device
from tiered.kernels.far_rows_ref import far_rows
from tiered.kernels.turn_directions_ref import turn_directions

# Ranks below every distance 1 − cosine: a row without direction is chosen only if no other is left, a barred row never.
LAST_RESORT = -1.0
BARRED = -2.0


def kmeans(
    units: UnitRows, clusters: int, *, iterations: int, seed: int, backend: Backend
) -> Int64[Tensor, "groups n"]:
    """The cluster of each row, −1 at invalid rows. Groups do not depend on each other.

    Every cluster has a member. A row belongs to the nearest direction, unless it was moved into a cluster that would be
    empty. The same arguments give the same result on the same device and versions. The host reads nothing from the
    device, except a copy of the rows for faiss.

    Args:
        units: finite rows, with at least `clusters` valid ones in each group.
        clusters: number of clusters of each group.
        iterations: number of iterations of `lloyd`.
        seed: seed of the start by greedy k-means++.
        backend: "torch" on the device of the rows, or "faiss" on the CPU.

    Raises:
        ImportError: backend "faiss" without faiss.
    """
    start = kmeans_start(units, clusters, seed)
    nearest, cosine = (lloyd if backend == "torch" else faiss_lloyd)(units, start, iterations)
    assignment = nearest if units.valid is None else nearest.where(units.valid, -1)
    return _fill_empty(units, assignment, cosine, clusters)


def lloyd(
    units: UnitRows, start: Float32[Tensor, "groups clusters width"], iterations: int
) -> tuple[Int64[Tensor, "groups n"], Float32[Tensor, "groups n"]]:
    """The nearest direction of each row, and the cosine to it, after `iterations` from the unit vectors `start`.

    An iteration assigns every row to its nearest direction, and then turns each direction to the sum of its rows.
    """
    directions, usable = start, units.usable
    weight = usable.float()
    # Distances of rows with cosine 0, which a row without direction always has.
    farthest = weight.where(usable, LAST_RESORT)
    far, turn = (for_device(op, start.device) for op in (far_rows, turn_directions))
    for _ in range(iterations):
        sums = torch.zeros_like(start)
        nearest, cosine = _assign(units, directions, sums)
        empty = torch.zeros_like(start[..., 0]).scatter_add_(1, nearest, weight) == 0
        # Each empty cluster gets the direction of another one of the rows farthest from their clusters.
        picks = far(farthest - cosine, empty, units.rounding)
        directions = turn(directions, sums, empty, picks, units.rows, units.inverse)
    return _assign(units, directions, None)


def _assign(units: UnitRows, directions: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """The nearest direction of every row, and the cosine to it. Adds each row to its cluster's sum in `sums`, unless
    that is None. Of directions that are equal up to rounding, the first gets the rows of all."""
    groups, n, _ = units.rows.shape
    nearest = torch.empty(groups, n, dtype=torch.int64, device=directions.device)
    cosine = torch.empty(groups, n, dtype=torch.float32, device=directions.device)
    first = first_alike(directions, units.rounding)
    for here, span, tile in units.tiles(columns=directions.shape[1]):
        # In this order of factors the product of few directions and many rows is faster on the CPU.
        best = torch.empty_like(nearest[here, span])
        torch.max(directions[here] @ tile.mT, 1, out=(cosine[here, span], best))
        torch.gather(first[here], 1, best, out=nearest[here, span])
        if sums is not None:
            add_by_cluster(sums[here], tile, nearest[here, span])
    return nearest, cosine


def _fill_empty(
    units: UnitRows, assignment: Int[Tensor, "groups n"], cosine: Float32[Tensor, "groups n"], clusters: int
) -> Int[Tensor, "groups n"]:
    """`assignment` with one row moved into every empty cluster.

    A row moves only from a cluster that keeps another, so no cluster stays empty if there are enough valid rows.
    """
    n = assignment.shape[1]
    keepers = nearest_members(cosine, assignment, clusters, units.rounding)
    empty = keepers == n
    rank = torch.where(units.usable, 1 - cosine, LAST_RESORT).where(assignment >= 0, BARRED)
    rank = _put(rank, keepers, BARRED)
    columns = for_device(far_rows, rank.device)(rank, empty, units.rounding).where(empty, n)
    return _put(assignment, columns, torch.arange(clusters, device=columns.device).expand_as(columns))


def _put(values: Tensor, columns: Int[Tensor, "groups puts"], new: Tensor | float) -> Tensor:
    """A copy of `values` with `new` at `columns`; values for column n are dropped."""
    return pad(values, (0, 1)).scatter_(1, columns, new)[:, :-1]
