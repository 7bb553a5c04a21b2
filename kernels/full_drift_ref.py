"""How far the attention of centroids has moved, from all keys of then and now: what `proxy_drift` must equal."""

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from tiered.kernels.divergence import divergence_terms
from tiered.kernels.proxy_attention_ref import SCORES_AT_ONCE, proxy_attention
from tiered.kernels.proxy_scores import proxy_scores


def full_drift(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    last_keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
) -> Float32[Tensor, "batch clusters"]:
    """KL of the proxy attention over `keys` from that over `last_keys`, mean over heads; O(clusters · length) work,
    and scores of a chunk of keys at a time. Arguments as for `proxy_attention`.

    Raises:
        ValueError: shapes that do not go together.
    """
    new, old = proxy_attention(queries, keys, key_mask), proxy_attention(queries, last_keys, key_mask)
    drift = torch.zeros_like(new.mass)
    chunk = max(16, SCORES_AT_ONCE // max(1, drift.numel()))
    for first in range(0, keys.shape[2], chunk):
        part = slice(first, first + chunk)
        log_new = new.log_probability(proxy_scores(queries, keys[:, :, part]))
        log_old = old.log_probability(proxy_scores(queries, last_keys[:, :, part]))
        if key_mask is not None:
            log_old.masked_fill_(~key_mask[:, None, None, part], -torch.inf)
        drift += divergence_terms(log_new, log_old).sum(-1)
    return drift.mean(1)
