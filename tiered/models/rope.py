"""Rotary position embedding in the rotate-half form (RoFormer, arXiv 2104.09864), computed in float32."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import Heads
from tiered.kernels.rotate_ref import HeadNorms, rotate
from tiered.models.rotation import Rotation


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosine and sine of every column's angles, float32. Their first axis is 1 if all sequences share positions.

    Attributes:
        query_scale: factor of the queries, by column; None for 1.
        columns: columns of the rows; None for all columns, in order.
    """

    cos: Float[Tensor, "batch 1 length half"]
    sin: Float[Tensor, "batch 1 length half"]
    query_scale: Float[Tensor, "batch 1 length 1"] | None
    columns: Int[Tensor, "sequences rows"] | None = None

    @classmethod
    def of(cls, positions: Int[Tensor, "batch length"], head_dim: int, rotation: Rotation) -> "Rotary":
        frequencies, scale = frequencies_and_scale(rotation, head_dim, positions.device)
        angles = positions[:, None, :, None].float() * frequencies
        grown = None
        if rotation.query_growth:
            grown = 1 + rotation.query_growth * torch.log(1 + (positions // rotation.trained).float())[:, None, :, None]
        if scale == 1:
            return cls(angles.cos(), angles.sin(), query_scale=grown)
        return cls(angles.cos() * scale, angles.sin() * scale, query_scale=grown)

    def at(self, rows: Rows) -> "Rotary":
        assert self.columns is None, "rows are numbered among all columns"
        if not rows.is_span:
            return replace(self, columns=rows.index)
        grown = None if self.query_scale is None else rows.take(self.query_scale)
        return Rotary(rows.take(self.cos), rows.take(self.sin), query_scale=grown)

    def of_sequences(self, which: slice | list[int]) -> "Rotary":
        if len(self.cos) == 1:
            return self
        grown = None if self.query_scale is None else self.query_scale[which]
        return Rotary(self.cos[which], self.sin[which], query_scale=grown)

    @property
    def elements(self) -> int:
        """Elements of a head that are rotated, the first ones."""
        return 2 * self.cos.shape[-1]

    def rotate(self, heads: Heads, norms: HeadNorms | None = None) -> Heads:
        """Rotated queries or keys, in their own dtype; one row for each of our columns. Heads of which all elements are
        rotated may be normed before, in the same launch."""
        if self.elements < heads.shape[-1]:
            assert norms is None, "norms take whole heads"
            return torch.cat([self.rotate(heads[..., : self.elements]), heads[..., self.elements :]], dim=-1)
        # float32 for every dtype of the model: at 32k positions bfloat16 angles are off by whole radians.
        return for_device(rotate, heads.device)(heads, self.cos, self.sin, self.columns, norms)

    def rotate_queries(self, heads: Heads) -> Heads:
        """`rotate` for queries, times `query_scale`."""
        return self.grown(self.rotate(heads))

    def grown(self, rotated: Heads) -> Heads:
        """Rotated queries, times `query_scale` in place."""
        scale = self.query_scale
        if scale is None:
            return rotated
        if self.columns is not None:
            scale = scale.expand(len(self.columns), -1, -1, -1).gather(2, self.columns[:, None, :, None])
        return rotated.mul_(scale.to(rotated.dtype))


def turning_pairs(rotation: Rotation, head_dim: int) -> int:
    """Pairs of elements of a head that turn, the first ones, if elements i and i + head_dim / 2 are a pair."""
    return int(rotation.part * head_dim // 2)


def frequencies_and_scale(
    rotation: Rotation, head_dim: int, device: torch.device
) -> tuple[Float32[Tensor, " half"], float]:
    """The angle of each pair of elements of heads from one position to the next, and the factor of cosines and
    sines."""
    theta, factor = rotation.theta, rotation.factor
    if rotation.kind == "proportional":
        pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
        return (1.0 / theta ** (2 * pairs / head_dim)).where(pairs < turning_pairs(rotation, head_dim), 0.0), 1.0
    head_dim = int(head_dim * rotation.part)
    if rotation.kind == "ntk":
        theta *= factor ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if rotation.kind == "linear":
        return frequencies / factor, 1.0
    if rotation.kind != "yarn":
        return frequencies, 1.0

    def pair(turns: float) -> float:
        """The fractional index of the pair that makes this number of turns within the trained positions."""
        return head_dim * math.log(rotation.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair(rotation.beta_fast)), 0)
    last = min(math.ceil(pair(rotation.beta_slow)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    # The two ends coincide if they are no farther apart than this.
    slowed = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    scale = rotation.attention_factor
    return frequencies * (1 - slowed + slowed / factor), 0.1 * math.log(factor) + 1 if scale is None else scale
