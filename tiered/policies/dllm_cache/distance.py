"""How far rows have moved from what is cached of them, and which have moved most: dLLM-Cache's V-verify.

Source: arXiv 2506.06295, section 3.3: the rows whose values are least similar to the cached ones are recomputed.
"""

from enum import StrEnum

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

# Below this share of a row's length (cosine: 1 − 5e-7) a distance may be rounding alone. Rows that stand still are
# many, such as those of the first layer whose tokens have not changed; noise must not choose among them, or a sequence
# would be answered otherwise in a batch than alone.
STILL = 2**-10
_TINY = 1e-30  # the length of a row of zeros


class Similarity(StrEnum):
    """What rows are compared by."""

    COSINE = "cosine"
    L2 = "l2"


def distances(
    new: Float[Tensor, "batch heads rows elements"],
    cached: Float[Tensor, "batch heads rows elements"],
    similarity: Similarity,
) -> Float32[Tensor, "batch rows"]:
    """Distance of each row, all heads together, from the cached one; 0 where it is no more than rounding.

    By cosine it is that of the two directions, √(2 − 2·cos): in the order of falling cosine, and exact where the cosine
    itself rounds to 1.
    """
    length = _length(cached)
    if similarity is Similarity.COSINE:
        difference = (new / _length(new)).sub_(cached / length)
        length = torch.ones_like(length)
    else:
        difference = new.float() - cached
    apart = torch.linalg.vector_norm(difference, dim=(1, 3), dtype=torch.float32)
    return apart.masked_fill_(apart <= STILL * length[:, 0, :, 0], 0.0)


def farthest_first(apart: Float32[Tensor, "batch rows"], first: int) -> Int[Tensor, "batch rows"]:
    """The rows by falling distance. Of equal ones, those from row `first` on come first, in ascending order, and then
    those in front of it: rows of the block that is being denoised, before what lies behind it or is finished."""
    order = apart.roll(-first, dims=1).argsort(dim=1, descending=True, stable=True)
    return order.add_(first).remainder_(apart.shape[1])


def _length(rows: Float[Tensor, "batch heads rows elements"]) -> Float32[Tensor, "batch 1 rows 1"]:
    """Euclidean length of each row, all heads together; never 0."""
    return torch.linalg.vector_norm(rows, dim=(1, 3), keepdim=True, dtype=torch.float32).clamp_(min=_TINY)
