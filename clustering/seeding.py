"""The start of k-means by greedy k-means++ (Arthur and Vassilvitskii, SODA 2007)."""

import math

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor
from torch.nn.functional import threshold

from tiered.clustering.tiles import CPU_ELEMENTS, DEVICE_ELEMENTS
from tiered.clustering.unit_rows import UnitRows, normalised
from tiered.kernels.host_values import on_device

# Rows are read once, into random projections of this width, because k-means++ compares every row once for each cluster.
# The projection changes squared distances by √(2/128) = 12 % (standard deviation).
SKETCH_WIDTH = 128
# More than any squared distance between projected rows of unit norm, which is at most 4 before the projection.
FARTHER_THAN_ANY = 16.0
# Of draws whose remaining distances are equal within this share, the first is chosen, because rounding must not choose.
AS_GOOD = 2**-10


def kmeans_start(units: UnitRows, clusters: int, seed: int) -> Float32[Tensor, "groups clusters width"]:
    """Directions of rows that are far from each other. Groups use the same random numbers, and do not depend on each
    other.

    Each pick is the best of 4 + 2·ln(clusters) rows, drawn in proportion to 1 − cosine to the nearest earlier pick.
    Rows that equal a pick up to rounding are not drawn. If fewer rows have a direction than there are clusters, some
    are repeated. The host reads nothing from the device.
    """
    groups, n, width = units.rows.shape
    device = units.rows.device
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(clusters, 4 + int(2 * math.log(clusters)), dtype=torch.float64, generator=generator)
    draws, projection = on_device(draws, device), None
    if width > SKETCH_WIDTH:
        projection = on_device(torch.randn(width, SKETCH_WIDTH, generator=generator), device)
    elements = CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS
    many = max(1, elements // (n * min(width, SKETCH_WIDTH)))
    parts = [units.part(slice(first, first + many)) for first in range(0, groups, many)]
    picks = torch.cat([_picks(_sketch(part, projection), part.usable, draws, units.rounding) for part in parts])
    # Rows without a direction are replaced by unit vectors along the axes.
    axes = torch.nn.functional.one_hot(torch.arange(clusters, device=device) % width, width).float()
    return normalised(units.take(picks), axes.expand(groups, -1, -1))


def _sketch(units: UnitRows, projection: Float[Tensor, "width sketch"] | None) -> Float32[Tensor, "groups n sketch"]:
    groups, n, width = units.rows.shape
    columns = width if projection is None else projection.shape[1]
    sketch = torch.empty(groups, n, columns, dtype=torch.float32, device=units.rows.device)
    for here, span, tile in units.tiles():
        sketch[here, span] = tile if projection is None else tile @ projection / math.sqrt(columns)
    return sketch


def _picks(
    sketch: Float32[Tensor, "groups n sketch"],
    usable: Bool[Tensor, "groups n"],
    draws: Float64[Tensor, "clusters trials"],
    apart: float,
) -> Int[Tensor, "groups clusters"]:
    _, n, width = sketch.shape
    norms = sketch.square().sum(-1)
    # Squared distance of each row to the nearest pick.
    left = usable * FARTHER_THAN_ANY
    picks = []
    for draw in draws:
        mass = left.cumsum(1, dtype=torch.float64)
        # If all distances are 0, the last row is drawn: no pick reduces them.
        drawn = torch.searchsorted(mass, draw * mass[:, -1:], right=True).clamp_max_(n - 1)
        points = sketch.gather(1, drawn[..., None].expand(-1, -1, width))
        distances = torch.baddbmm(norms[:, None] + norms.gather(1, drawn)[..., None], points, sketch.mT, alpha=-2)
        # Squared distances between unit rows are 2 − 2·cosine.
        left_then = torch.minimum(threshold(distances, 2 * apart, 0), left[:, None])
        sums = left_then.sum(2)
        as_good = sums <= (1 + AS_GOOD) * sums.amin(1, keepdim=True)
        best = as_good.view(torch.uint8).argmax(1, keepdim=True)  # the first
        left = left_then.gather(1, best[..., None].expand(-1, -1, n)).squeeze(1)
        picks.append(drawn.gather(1, best))
    return torch.cat(picks, dim=1)
