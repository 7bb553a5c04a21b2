"""Heads of queries or keys, rotated by the angles of their rows (RoFormer, arXiv 2104.09864): the oracle."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.kernels.coded_rows import Heads
from tiered.kernels.rms_norm_ref import check_norm, rms_norm

Tables = Float32[Tensor, "tables 1 length half"]


class HeadNorms(NamedTuple):
    """Norms of heads, as `rms_norm` of each.

    Attributes:
        queries, keys: weights of the first `count` heads, and of those behind them.
        eps, offset: as in `rms_norm`.
    """

    queries: Float[Tensor, " head_dim"]
    keys: Float[Tensor, " head_dim"]
    count: int
    eps: float
    offset: float | None


def rotate(
    heads: Heads,
    cos: Tables,
    sin: Tables,
    columns: Int[Tensor, "batch rows"] | None = None,
    norms: HeadNorms | None = None,
) -> Heads:
    """Elements i and i + half of each head, rotated in float32 by an angle of the row, and rounded to the dtype of
    `heads`.

    Args:
        cos, sin: of the angles of every column. One table for all sequences, or one for each, those of `heads` first.
        columns: column of each row; None if the rows are all columns, in order.
        norms: norms of `heads` in front of the rotation; None for no norm.

    Raises:
        ValueError: shapes do not match.
    """
    check_rotation(heads, cos, sin, columns, norms)
    if norms is not None:
        parts = heads.split([norms.count, heads.shape[1] - norms.count], dim=1)
        normed = [
            rms_norm(part.flatten(0, 1), weight, norms.eps, offset=norms.offset).view(part.shape)
            for part, weight in zip(parts, (norms.queries, norms.keys), strict=True)
        ]
        heads = torch.cat(normed, dim=1)
    if columns is not None:
        sequences = torch.arange(len(heads), device=heads.device) if len(cos) > 1 else columns.new_zeros(1)
        cos, sin = (table[sequences[:, None], :, columns].transpose(1, 2) for table in (cos, sin))
    left, right = heads.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(heads.dtype)


def check_rotation(
    heads: Heads, cos: Tables, sin: Tables, columns: Int[Tensor, "batch rows"] | None, norms: HeadNorms | None
) -> None:
    """Raise `ValueError` unless the tables have the angles of every row of `heads`, and `norms` fit them."""
    batch, _, rows, head_dim = heads.shape
    tables, _, length, half = cos.shape
    if columns is None:
        there = length == rows and tables in (1, batch)
    else:
        there = columns.shape == (batch, rows) and (tables == 1 or tables >= batch)
    if not there or head_dim != 2 * half or sin.shape != cos.shape:
        of_rows = "" if columns is None else f" at columns {tuple(columns.shape)}"
        raise ValueError(
            f"angles {tuple(cos.shape)} and {tuple(sin.shape)}{of_rows} do not fit heads {tuple(heads.shape)}"
        )
    if norms is not None:
        for weight in (norms.queries, norms.keys):
            check_norm(heads[:, 0], weight, None)
        if not 0 <= norms.count <= heads.shape[1]:
            raise ValueError(f"{norms.count} heads of queries are not among {heads.shape[1]}")
