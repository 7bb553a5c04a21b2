"""The iterations of spherical k-means in plain torch, on any device, for many groups at once."""

from typing import NamedTuple

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from tiered.clustering.cluster_sums import add_by_cluster
from tiered.clustering.empty_clusters import reseed_empty
from tiered.clustering.unit_rows import UnitRows, first_alike, normalised


class Fit(NamedTuple):
    """What a backend returns: directions, the nearest of them and its cosine for every row, iterations done."""

    directions: Float32[Tensor, "groups clusters width"]
    nearest: Int64[Tensor, "groups n"]
    cosine: Float32[Tensor, "groups n"]
    iterations: int


def lloyd(
    units: UnitRows, start: Float32[Tensor, "groups clusters width"], iterations: int, tolerance: float | None
) -> Fit:
    """From the unit vectors `start`: give every row to its nearest direction, turn that to the sum of its rows; repeat.

    A group stops when its Σ cosine has grown by no more than the fraction `tolerance` of itself, and stays as it is
    while others go on. One host synchronisation an iteration then, of one flag a group; none with `tolerance=None`.
    """
    groups, n, _ = units.rows.shape
    directions = start
    nearest = torch.zeros(groups, n, dtype=torch.int64, device=start.device)
    cosine = torch.zeros(groups, n, dtype=torch.float32, device=start.device)
    settled = torch.zeros(groups, dtype=torch.bool, device=start.device)
    skip = [False] * groups
    before = None
    for iteration in range(iterations):
        sums = torch.zeros_like(start)
        _assign(units, directions, nearest, cosine, sums, skip)
        if tolerance is not None:
            now = cosine.sum(1, dtype=torch.float64)
            if before is not None:
                # A group that has settled keeps its directions, so it gains nothing more.
                settled = now - before <= tolerance * before.abs()
                skip = settled.tolist()
                if all(skip):
                    return Fit(directions, nearest, cosine, iteration)
            before = now
        turned = reseed_empty(units, normalised(sums, directions), nearest, cosine)
        directions = directions.where(settled[:, None, None], turned)
    _assign(units, directions, nearest, cosine, None, skip)
    return Fit(directions, nearest, cosine, iterations)


def _assign(
    units: UnitRows, directions: Tensor, nearest: Tensor, cosine: Tensor, sums: Tensor | None, skip: list[bool]
) -> None:
    """Write `nearest` and `cosine`, and add each row to its cluster's sum, in one pass over the rows. Of directions
    that are alike but for rounding the first gets the rows of all."""
    first = first_alike(directions, units.rounding)
    for here, span, tile in units.tiles(columns=directions.shape[1], skip=skip):
        cosine[here, span], best = (tile @ directions[here].mT).max(-1)
        nearest[here, span] = first[here].gather(1, best)
        if sums is not None:
            add_by_cluster(sums[here], tile, nearest[here, span])
