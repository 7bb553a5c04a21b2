"""A distribution of attention over changing columns and all others as one: what drift is measured against."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_scores import check_attention, proxy_scores


@dataclass(frozen=True, slots=True)
class DriftDistribution:
    """Scores of the columns whose keys may have changed since, and the sum over the rest, which has not.

    Attributes:
        rest: log-sum-exp over the columns whose keys stay as they are.
        scores: of the changing columns; −inf at those that do not count.
        soft_cap: of all scores; None: they have none.
    """

    rest: LogSumExp
    scores: Float32[Tensor, "batch heads clusters changing"]
    soft_cap: float | None

    def current_scores(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads changing head_dim"],
    ) -> Float32[Tensor, "batch heads clusters changing"]:
        """Scores of the changing columns with the `keys` that stand there now."""
        self.check(queries, keys)
        return proxy_scores(queries, keys, self.soft_cap).masked_fill_(self.scores == -torch.inf, -torch.inf)

    def check(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads changing head_dim"],
    ) -> None:
        """Raise `ValueError` where `queries` and `keys` do not go together, or are not as many as there are scores."""
        check_attention(queries, keys)
        if self.scores.shape != (*queries.shape[:3], keys.shape[2]):
            raise ValueError(
                f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} do not fit a reference with scores "
                f"{tuple(self.scores.shape)}"
            )

    def log_probabilities(
        self, scores: Float32[Tensor, "batch heads clusters changing"]
    ) -> Float32[Tensor, "batch heads clusters columns"]:
        """Log-probabilities of the changing columns at `scores`, and last of the rest as one column."""
        total = self.rest.plus(scores.clone())
        # In two parts, as in LogSumExp: adding them first would round both.
        rest = total.log_probability(self.rest.peak[..., None]) + self.rest.mass.log()[..., None]
        return torch.cat([total.log_probability(scores), rest], dim=-1)
