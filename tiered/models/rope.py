"""Rotary position embedding in the rotate-half form (RoFormer, arXiv 2104.09864), computed in float32."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.kernels.choice import for_device
from tiered.kernels.rotate_ref import rotate


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosine and sine of every column's angles, float32, and which columns are meant.

    Attributes:
        cos, sin: the first axis is 1 where all sequences share positions.
        columns: of the rows; None: all columns, in order.
    """

    cos: Float[Tensor, "batch 1 length half"]
    sin: Float[Tensor, "batch 1 length half"]
    columns: Int[Tensor, "sequences rows"] | None = None

    @classmethod
    def of(cls, positions: Int[Tensor, "batch length"], head_dim: int, theta: float) -> "Rotary":
        """Angles for `positions` of heads with `head_dim` elements and RoPE base `theta`."""
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions[:, None, :, None].float() * (1.0 / theta**exponents)
        return cls(angles.cos(), angles.sin())

    def at(self, rows: Rows) -> "Rotary":
        """The angles of `rows` alone, of ours of all columns."""
        assert self.columns is None, "rows are numbered among all columns"
        if rows.start is None:
            return replace(self, columns=rows.index)
        return Rotary(rows.take(self.cos), rows.take(self.sin))

    def rotate(self, heads: Float[Tensor, "batch heads rows head_dim"]) -> Float[Tensor, "batch heads rows head_dim"]:
        """Queries or keys, one row for each of our columns, rotated; in their own dtype."""
        # float32 whatever the model's dtype: at 32k positions bfloat16 angles are off by whole radians.
        return for_device(rotate, heads.device)(heads, self.cos, self.sin, self.columns)
