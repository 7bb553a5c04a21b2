"""How far the attention of centroids has moved, from all keys of then and now: what `proxy_drift` must equal."""

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from tiered.kernels.divergence import divergence_terms
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_attention_ref import SCORES_AT_ONCE, proxy_attention
from tiered.kernels.proxy_scores import proxy_scores, sink_scores


def full_drift(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    last_keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Float32[Tensor, "batch clusters"]:
    """KL of the proxy attention over `keys` from that over `last_keys`, mean over heads; O(clusters · length) work,
    and scores of a chunk of keys at a time. Arguments as for `proxy_attention`; `sink_keys` are keys of each head that
    stand beside those of the columns, then and now.

    Raises:
        ValueError: shapes that do not go together.
    """
    new, old, drift = with_sinks(
        proxy_attention(queries, keys, key_mask, soft_cap),
        proxy_attention(queries, last_keys, key_mask, soft_cap),
        None if sink_keys is None else sink_scores(queries, sink_keys, soft_cap),
    )
    chunk = max(16, SCORES_AT_ONCE // max(1, drift.numel()))
    for first in range(0, keys.shape[2], chunk):
        part = slice(first, first + chunk)
        log_new = new.log_probability(proxy_scores(queries, keys[:, :, part], soft_cap))
        log_old = old.log_probability(proxy_scores(queries, last_keys[:, :, part], soft_cap))
        if key_mask is not None:
            log_old.masked_fill_(~key_mask[:, None, None, part], -torch.inf)
        drift += divergence_terms(log_new, log_old).sum(-1)
    return drift.mean(1)


def with_sinks(
    new: LogSumExp, old: LogSumExp, scores: Float32[Tensor, "batch heads clusters sinks"] | None
) -> tuple[LogSumExp, LogSumExp, Float32[Tensor, "batch heads clusters"]]:
    """Both sums with the sinks in them, and what these add to the divergence."""
    if scores is None:
        return new, old, torch.zeros_like(new.mass)
    new, old = new.plus(scores.clone()), old.plus(scores.clone())
    return new, old, divergence_terms(new.log_probability(scores), old.log_probability(scores)).sum(-1)
