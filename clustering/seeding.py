"""The start of k-means by greedy k-means++ (Arthur and Vassilvitskii, SODA 2007)."""

import math

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from tiered.clustering.tiles import CPU_ELEMENTS, DEVICE_ELEMENTS
from tiered.clustering.unit_rows import UnitRows
from tiered.kernels.choice import for_device
from tiered.kernels.directions import normalised
from tiered.kernels.greedy_picks_ref import greedy_picks
from tiered.kernels.host_values import on_device

# Rows are read once, into random projections of this width, because k-means++ compares every row once for each cluster.
# The projection changes squared distances by √(2/128) = 12 % (standard deviation).
SKETCH_WIDTH = 128


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
    pick = for_device(greedy_picks, device)
    picks = torch.cat([pick(_sketch(part, projection), part.usable, draws, units.rounding) for part in parts])
    # Rows without a direction are replaced by unit vectors along the axes.
    axes = torch.eye(min(clusters, width), width, device=device).repeat(-(-clusters // width), 1)[:clusters]
    return normalised(units.take(picks), axes.expand(groups, -1, -1))


def _sketch(units: UnitRows, projection: Float[Tensor, "width sketch"] | None) -> Float32[Tensor, "groups n sketch"]:
    groups, n, width = units.rows.shape
    columns = width if projection is None else projection.shape[1]
    sketch = torch.empty(groups, n, columns, dtype=torch.float32, device=units.rows.device)
    for here, span, tile in units.tiles():
        sketch[here, span] = tile if projection is None else tile @ projection / math.sqrt(columns)
    return sketch
