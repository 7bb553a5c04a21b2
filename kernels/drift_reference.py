"""The attention of centroids at the last update, kept so that the drift since then needs the changed keys alone."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_attention_ref import proxy_attention
from tiered.kernels.proxy_scores import check_attention, proxy_scores


@dataclass(frozen=True, slots=True)
class DriftReference:
    """A distribution over columns, split into those whose keys may change before the next update and the rest.

    The rest is summed without the changing columns. Their share could be taken off a sum over everything instead, but
    where they hold nearly all of it the difference is noise.

    It takes batch · heads · clusters · (changing + 2) float32.

    Attributes:
        rest: log-sum-exp over the columns whose keys stay as they are.
        scores: of the changing columns; −inf at those that do not count.
    """

    rest: LogSumExp
    scores: Float32[Tensor, "batch heads clusters changing"]

    @classmethod
    def of(
        cls,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        changing: Int[Tensor, "batch changing"],
        valid: Bool[Tensor, "batch changing"] | None = None,
        key_mask: Bool[Tensor, "batch length"] | None = None,
    ) -> "DriftReference":
        """The attention of `queries` over all `keys`, as both are now.

        Args:
            queries: of the centroids, rotated at the positions of their medoids.
            keys: as cached, rotated.
            changing: columns whose keys may change before the next reference is made; distinct where valid, anything
                in range where not.
            valid: False at filler, where sequences have different numbers of changing columns.
            key_mask: False at columns that nothing may attend to.

        Raises:
            ValueError: shapes that do not go together.
        """
        batch, _, length, head_dim = keys.shape
        visible = keys.new_ones(batch, length, dtype=torch.bool) if key_mask is None else key_mask
        counts = torch.ones_like(changing, dtype=torch.bool) if valid is None else valid
        changes = torch.zeros_like(visible, dtype=torch.int32).scatter_add_(1, changing.long(), counts.int()) > 0
        rest = for_device(proxy_attention, keys.device)(queries, keys, visible & ~changes)
        index = changing.long()[:, None, :, None].expand(-1, keys.shape[1], -1, head_dim)
        counts = counts & visible.gather(1, changing.long())
        scores = proxy_scores(queries, keys.gather(2, index))
        return cls(rest, scores.masked_fill_(~counts[:, None, None], -torch.inf))

    def refreshed(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads changing head_dim"],
    ) -> "DriftReference":
        """The current distribution as the reference: an update has happened that changed no other keys than `keys`,
        which stand at the changing columns now, and no query. Any other change needs `of`."""
        return replace(self, scores=self.current_scores(queries, keys))

    def current_scores(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads changing head_dim"],
    ) -> Float32[Tensor, "batch heads clusters changing"]:
        """Scores of the changing columns with the `keys` that stand there now."""
        self.check(queries, keys)
        return proxy_scores(queries, keys).masked_fill_(self.scores == -torch.inf, -torch.inf)

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
