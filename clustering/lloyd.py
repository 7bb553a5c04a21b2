"""The iterations of spherical k-means in plain torch, on any device, for many groups at once.

Clusters that have lost all their members get the rows that are farthest from their own.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor

from tiered.clustering.summaries import add_by_cluster, nearest_members
from tiered.clustering.unit_rows import UnitRows, first_alike, normalised

# Ranks below every distance 1 − cosine: a row without direction is taken when no other is left, a barred one never.
LAST_RESORT = -1.0
BARRED = -2.0
# Distances are ranked in so many steps, from the largest to 0: rows that ought to be equal rank alike.
STEPS = 64


class Fit(NamedTuple):
    """What a backend returns: directions, and for every row the nearest of them and its cosine to it."""

    directions: Float32[Tensor, "groups clusters width"]
    nearest: Int64[Tensor, "groups n"]
    cosine: Float32[Tensor, "groups n"]


def lloyd(units: UnitRows, start: Float32[Tensor, "groups clusters width"], iterations: int) -> Fit:
    """From the unit vectors `start`: give every row to its nearest direction, turn that to the sum of its rows; repeat.

    No host synchronisation.
    """
    directions, weight = start, units.usable.float()
    # Distances where all cosines are 0, as those of a row without direction always are.
    farthest = torch.where(units.usable, 1.0, LAST_RESORT)
    for _ in range(iterations):
        sums = torch.zeros_like(start)
        nearest, cosine = _assign(units, directions, sums)
        empty = torch.zeros_like(start[..., 0]).scatter_add_(1, nearest, weight) == 0
        directions = _reseed(units, normalised(sums, directions), empty, farthest - cosine)
    return Fit(directions, *_assign(units, directions, None))


def _assign(units: UnitRows, directions: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """The nearest direction of every row and its cosine to it; each row is added to its cluster's sum on the way. Of
    directions that are alike but for rounding the first gets the rows of all."""
    groups, n, _ = units.rows.shape
    nearest = torch.empty(groups, n, dtype=torch.int64, device=directions.device)
    cosine = torch.empty(groups, n, dtype=torch.float32, device=directions.device)
    first = first_alike(directions, units.rounding)
    for here, span, tile in units.tiles(columns=directions.shape[1]):
        # In this order of factors the product is faster on the CPU, where few directions meet many rows.
        cosine[here, span], best = (directions[here] @ tile.mT).max(1)
        nearest[here, span] = first[here].gather(1, best)
        if sums is not None:
            add_by_cluster(sums[here], tile, nearest[here, span])
    return nearest, cosine


def _reseed(
    units: UnitRows,
    directions: Float32[Tensor, "groups clusters width"],
    empty: Bool[Tensor, "groups clusters"],
    distance: Float[Tensor, "groups n"],
) -> Float32[Tensor, "groups clusters width"]:
    """`directions`, where an empty cluster, which no row with a direction is nearest to, points at one of the rows that
    are farthest from theirs; each at a different row. Rows stay where they are: the next pass assigns them."""
    picks = _farthest(distance, empty, units.rounding)
    return torch.where(empty[..., None], normalised(units.take(picks), directions), directions)


def fill_empty(
    units: UnitRows,
    directions: Float32[Tensor, "groups clusters width"],
    assignment: Int[Tensor, "groups n"],
    cosine: Float32[Tensor, "groups n"],
) -> tuple[Float32[Tensor, "groups clusters width"], Int[Tensor, "groups n"], Float32[Tensor, "groups n"]]:
    """Move one row into every empty cluster, and point the cluster at it: new directions, assignment and cosines.

    A row moves only from a cluster that keeps another, so with as many valid rows as clusters none stays empty.
    `assignment` is −1 at invalid rows.
    """
    clusters, n = directions.shape[1], assignment.shape[1]
    keepers = nearest_members(cosine, assignment, clusters, units.rounding)
    empty = keepers == n
    usable = units.usable
    rank = torch.where(usable, 1 - cosine, LAST_RESORT).where(assignment >= 0, BARRED)
    picks = _farthest(_put(rank, keepers, torch.full_like(directions[..., 0], BARRED)), empty, units.rounding)
    columns = picks.where(empty, n)
    assignment = _put(assignment, columns, torch.arange(clusters, device=picks.device).expand_as(columns))
    cosine = _put(cosine, columns, usable.gather(1, picks).float())
    return torch.where(empty[..., None], normalised(units.take(picks), directions), directions), assignment, cosine


def _farthest(
    rank: Float[Tensor, "groups n"], empty: Bool[Tensor, "groups clusters"], apart: float
) -> Int[Tensor, "groups clusters"]:
    """For the i-th empty cluster of a group the row of the i-th highest rank; for the others any row. Of ranks that
    differ by less than a step, or than `apart`, the first row's is higher."""
    most = rank.amax(1, keepdim=True)
    order = ((most - rank) / (most / STEPS).clamp_min(apart)).floor().argsort(dim=1, stable=True)
    return order.gather(1, (empty.cumsum(1) - 1).clamp_min(0))


def _put(values: Tensor, columns: Int[Tensor, "groups puts"], new: Tensor) -> Tensor:
    """A copy of `values` with `new` at `columns`; column n is no place."""
    spare = torch.zeros_like(values[:, :1])
    return torch.cat([values, spare], dim=1).scatter_(1, columns, new)[:, :-1]
