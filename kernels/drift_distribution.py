"""A distribution of attention over changing columns and the parts of all others: what drift is measured against."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_scores import check_attention, keys_at, proxy_scores


@dataclass(frozen=True, slots=True)
class DriftDistribution:
    """Scores of the columns whose keys may have changed since, and sums over the rest, which has not.

    A column is written as its number on the canvas, or as `length`, the number behind the last, where it does not
    count.

    Attributes:
        scores: of the changing columns; −inf at those that do not count.
        columns: where these stand.
        sums: over the rest, part by part: a column of the rest is in the sum of its part alone.
        sizes: columns in the sum of each part.
        part_of: the part that every column belongs to, in the sums or not; −1 where nothing may attend, and at
            `length`. There may be parts that no column belongs to.
        soft_cap: of all scores; None: they have none.
    """

    scores: Float32[Tensor, "batch heads clusters changing"]
    columns: Int[Tensor, "batch changing"]
    sums: LogSumExp
    sizes: Int[Tensor, "batch parts"]
    part_of: Int[Tensor, "batch places"]
    soft_cap: float | None

    @property
    def rest(self) -> LogSumExp:
        """Over all columns of the rest."""
        peak, mass = self.sums.peak, self.sums.mass
        return LogSumExp(peak[..., 0], mass[..., 0]) if peak.shape[3] == 1 else self.sums.merged()

    def check(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads _ head_dim"],
        index: Int[Tensor, "batch columns"] | None,
        count: int,
    ) -> None:
        """Raise `ValueError` where `queries` and `keys` do not go together, or are not of as many centroids as there
        are scores and of `count` columns."""
        check_attention(queries, keys)
        found = keys.shape[2] if index is None else index.shape[1]
        if self.scores.shape[:3] != queries.shape[:3] or found != count:
            raise ValueError(
                f"queries {tuple(queries.shape)} and keys of {found} columns do not fit a reference with scores "
                f"{tuple(self.scores.shape)} where there are {count} columns"
            )

    def scores_of(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads _ head_dim"],
        index: Int[Tensor, "batch columns"] | None,
        counts: Bool[Tensor, "batch columns"],
    ) -> Float32[Tensor, "batch heads clusters columns"]:
        """Scores of columns by the keys that stand there; −inf at those that do not count."""
        scores = proxy_scores(queries, keys_at(keys, index), self.soft_cap)
        return scores.masked_fill_(~counts[:, None, None], -torch.inf)

    def log_probabilities(
        self, scores: Float32[Tensor, "*times batch heads clusters changing"]
    ) -> Float32[Tensor, "*times batch heads clusters columns"]:
        """Log-probabilities of the changing columns at `scores`, and last of the rest as one column."""
        rest = self.rest
        total = rest.plus(scores.clone())
        # In two parts, as in LogSumExp: adding them first would round both.
        last = total.log_probability(rest.peak[..., None].expand(*scores.shape[:-1], 1)).add_(
            rest.mass.log()[..., None]
        )
        return torch.cat([total.log_probability(scores), last], dim=-1)
