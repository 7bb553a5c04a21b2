"""Rotary position embedding in the rotate-half form (RoFormer, arXiv 2104.09864), computed in float32."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.rows import Rows


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosine and sine of every position's angles, float32; the first axis is 1 where all sequences share positions."""

    cos: Float[Tensor, "batch 1 length half"]
    sin: Float[Tensor, "batch 1 length half"]

    @classmethod
    def of(cls, positions: Int[Tensor, "batch length"], head_dim: int, theta: float) -> "Rotary":
        """Angles for `positions` of heads with `head_dim` elements and RoPE base `theta`."""
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions[:, None, :, None].float() * (1.0 / theta**exponents)
        return cls(angles.cos(), angles.sin())

    def at(self, rows: Rows) -> "Rotary":
        """The angles of `rows` alone."""
        return Rotary(rows.take(self.cos), rows.take(self.sin))

    def rotate(self, heads: Float[Tensor, "batch heads rows head_dim"]) -> Float[Tensor, "batch heads rows head_dim"]:
        """Queries or keys, one row for each of our positions, rotated; in their own dtype."""
        # float32 whatever the model's dtype: at 32k positions bfloat16 angles are off by whole radians.
        left, right = heads.float().chunk(2, dim=-1)
        rotated = torch.cat([left * self.cos - right * self.sin, right * self.cos + left * self.sin], dim=-1)
        return rotated.to(heads.dtype)
