"""Rows and sums of rows as directions: vectors of unit norm in float32."""

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

# Below this norm the squares of a row leave float32's range, so the row counts as zero, without a direction.
ZERO_NORM = 1e-18


def normalised(
    vectors: Float32[Tensor, "groups k width"], otherwise: Float32[Tensor, "groups k width"]
) -> Float32[Tensor, "groups k width"]:
    """`vectors` at unit norm, with `otherwise` in place of vectors without a direction, which include NaN."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return torch.where(norms > ZERO_NORM, vectors / norms, otherwise)


def scaled_rows(
    rows: Float[Tensor, "groups n width"], scale: Float32[Tensor, "groups n"], picks: Int[Tensor, "groups picks"]
) -> Float32[Tensor, "groups picks width"]:
    """`rows · scale` at `picks`."""
    picked = rows.gather(1, picks[..., None].expand(-1, -1, rows.shape[2]))
    return (picked * scale.gather(1, picks)[..., None]).float()  # with float32 it is not rounded to the rows' dtype
