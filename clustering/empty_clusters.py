"""Clusters that have lost all their members get the rows that are farthest from their own."""

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.clustering.nearest_members import nearest_members
from tiered.clustering.unit_rows import UnitRows, normalised

# Ranks below every distance 1 − cosine: a row without direction is taken when no other is left, a barred one never.
LAST_RESORT = -1.0
BARRED = -2.0
# Distances are ranked in so many steps, from the largest to 0: rows that ought to be equal rank alike.
STEPS = 64


def reseed_empty(
    units: UnitRows,
    directions: Float32[Tensor, "groups clusters width"],
    nearest: Int[Tensor, "groups n"],
    cosine: Float32[Tensor, "groups n"],
) -> Float32[Tensor, "groups clusters width"]:
    """`directions`, where a cluster that no row with a direction is nearest to points at one of the rows that are
    farthest from theirs; each at a different row. Rows stay where they are: the next pass assigns them."""
    usable = units.inverse > 0
    counts = torch.zeros_like(directions[..., 0]).scatter_add_(1, nearest, usable.float())
    picks = _farthest(torch.where(usable, 1 - cosine, LAST_RESORT), counts == 0, units.rounding)
    return torch.where((counts == 0)[..., None], normalised(units.take(picks), directions), directions)


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
    usable = units.inverse > 0
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
