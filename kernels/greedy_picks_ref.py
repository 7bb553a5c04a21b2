"""The picks of greedy k-means++ among projected rows: the oracle, in plain torch."""

import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor
from torch.nn.functional import threshold

# More than any squared distance between projected rows of unit norm, which is at most 4 before the projection.
FARTHER_THAN_ANY = 16.0
# Of draws whose remaining distances are equal within this share, the first is chosen, because rounding must not choose.
AS_GOOD = 2**-10


def greedy_picks(
    sketch: Float32[Tensor, "groups n sketch"],
    usable: Bool[Tensor, "groups n"],
    draws: Float64[Tensor, "clusters trials"],
    apart: float,
) -> Int64[Tensor, "groups clusters"]:
    """A row for each cluster of a group, one after the other: of `trials` rows, the one that leaves the least distance.

    The rows are drawn by `draws`, from 0 to 1, in proportion to the squared distance to the nearest earlier pick. The
    first ones are drawn from all `usable` rows alike. A squared distance of at most 2 · `apart` counts as 0.
    """
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
