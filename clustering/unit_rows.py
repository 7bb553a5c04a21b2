"""Rows as directions, for spherical k-means."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor

from tiered.clustering.tiles import tiles
from tiered.kernels.directions import ZERO_NORM, scaled_rows


def rounding(dtype: torch.dtype) -> float:
    """The distance 1 − cosine up to which rows of `dtype` count as one direction: δ²/2, with δ = 4ε, and at least 2⁻⁸.

    Rows that should be equal, such as masks that see only masks, differ by rounding. Rounding depends on the machine
    and on the rest of the batch, so it must not decide a choice. An addition rounds a row by about ε/5 of its length,
    the hundred additions of a forward by 2ε, and the difference of two rows by 3ε. A float32 cosine resolves δ = 2⁻⁸:
    it is 1 − 2⁻¹⁷ there, with an error of a few 2⁻²³. The divergence of distributions whose log-probabilities differ by
    δ is δ²/2 too.
    """
    return max(2**-8, 4 * torch.finfo(dtype).eps) ** 2 / 2


@dataclass(frozen=True, slots=True, eq=False)
class UnitRows:
    """Rows of unit norm in float32, computed from `rows` at each use; zero rows and invalid rows are zeros.

    Attributes:
        rows: tensor of the caller.
        valid: False at invalid rows; None if all rows are valid.
        inverse: 1 / norm of each row, 0 at zero rows and invalid rows.
        finite: True if every valid row has a finite norm in float32; on the device.
    """

    rows: Float[Tensor, "groups n width"]
    valid: Bool[Tensor, "groups n"] | None
    inverse: Float32[Tensor, "groups n"]
    finite: Bool[Tensor, ""]

    @classmethod
    def of(cls, rows: Float[Tensor, "groups n width"], valid: Bool[Tensor, "groups n"] | None = None) -> "UnitRows":
        """`rows` (float16, bfloat16, float32 or float64), read once for their norms."""
        norms = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
        for here, span, tile in tiles(rows, torch.ones_like(norms), gaps=False):
            norms[here, span] = torch.linalg.vector_norm(tile, dim=-1)
        if valid is not None:
            norms = norms.where(valid, 0)
        inverse = norms.reciprocal().where(norms > ZERO_NORM, 0)
        return cls(rows, valid, inverse, norms.isfinite().all())

    @property
    def rounding(self) -> float:
        return rounding(self.rows.dtype)

    @property
    def usable(self) -> Bool[Tensor, "groups n"]:
        """True at rows with a direction."""
        return self.inverse > 0

    def numbers(self) -> Int64[Tensor, "groups n"]:
        """The number of each valid row in its group; −1 at invalid rows."""
        if self.valid is None:
            return torch.arange(self.rows.shape[1], device=self.rows.device).expand(self.rows.shape[:2])
        return (self.valid.cumsum(1) - 1).where(self.valid, -1)

    def part(self, groups: slice | list[int], columns: slice = slice(None), *, whole: bool = False) -> "UnitRows":
        """Some columns of some groups, as views if `groups` is a slice; `whole`: whether all these rows are valid."""
        valid = None if whole or self.valid is None else self.valid[groups, columns]
        return UnitRows(self.rows[groups, columns], valid, self.inverse[groups, columns], self.finite)

    def tiles(self, *, columns: int = 1) -> Iterator[tuple[slice, slice, Tensor]]:
        return tiles(self.rows, self.inverse, gaps=self.valid is not None, columns=columns)

    def take(self, picks: Int[Tensor, "groups picks"]) -> Float32[Tensor, "groups picks width"]:
        """The unit rows at `picks`; zero rows are zeros, and invalid rows are undefined."""
        return scaled_rows(self.rows, self.inverse, picks)


def first_alike(directions: Float32[Tensor, "groups clusters width"], apart: float) -> Int[Tensor, "groups clusters"]:
    """For each direction, the first one within a distance 1 − cosine of `apart`: itself, or an earlier one."""
    alike = directions @ directions.mT >= 1 - apart
    return alike.view(torch.uint8).argmax(-1)
