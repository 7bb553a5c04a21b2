"""The cosine distance of cached vectors, column by column."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from tiered.core.rows import Rows
from tiered.forward.costs import part_rows


def cosine_distances(
    left: Float[Tensor, "sequences heads length elements"], right: Float[Tensor, "sequences heads length elements"]
) -> Float[Tensor, "sequences length"]:
    """1 − cos of each column's vectors, the mean over heads, in float32, a part of the columns at a time.

    Computed as |u − v|² / 2 of the unit vectors: the same number, but 0 where both are the same and never below, while
    1 − cos rounds to steps of 6e-8.
    """
    distances = torch.empty(left.shape[0], left.shape[2], device=left.device)
    for part in Rows.span(0, left.shape[2]).parts(part_rows(len(left))):
        apart = normalize(left[:, :, part].float(), dim=-1).sub_(normalize(right[:, :, part].float(), dim=-1))
        distances[:, part] = apart.square_().sum(dim=-1).mean(dim=1).div_(2)
    return distances
