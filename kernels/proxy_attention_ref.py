"""How much attention centroids pay in all: the oracle, in plain torch."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.kernels.log_sum_exp import LogSumExp, members
from tiered.kernels.proxy_scores import check_attention, proxy_scores

SCORES_AT_ONCE = 1 << 19  # 2 MiB of float32: scores are read three times while they lie in the cache


def proxy_attention(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
    part: Int[Tensor, "batch length"] | None = None,
    parts: int = 1,
) -> LogSumExp:
    """Log-sum-exp over all keys of the scores q·k / √head_dim, by batch, head and cluster, in float32; of each part of
    the keys, along a last dimension, where there are parts.

    Scores exist for a chunk of keys at a time; those of chosen columns come from `proxy_scores`, and their
    probabilities from `LogSumExp.log_probability`. Sums of parts take rows · length · parts more multiplications; a row
    is a query of a head.

    Args:
        queries: of the centroids, rotated at the positions of their medoids.
        keys: as cached, rotated. Head h reads key head h // (heads / kv_heads).
        key_mask: False at columns that nothing may attend to.
        soft_cap: c where scores s count as c · tanh(s / c); None: as they are.
        part: of every column, below `parts`; −1 counts as masked. None: no parts.
        parts: how many there are.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_attention(queries, keys)
    queries = queries.float()
    rows = queries[..., 0]
    total = LogSumExp.empty(rows if part is None else rows[..., None].expand(*rows.shape, parts))
    # Each chunk goes over all sums: it holds as many scores at least.
    chunk = max(16, parts, SCORES_AT_ONCE // max(1, rows.numel()))
    for first in range(0, keys.shape[2], chunk):
        columns = slice(first, first + chunk)
        scores = proxy_scores(queries, keys[:, :, columns], soft_cap)
        if key_mask is not None:
            scores.masked_fill_(~key_mask[:, None, None, columns], -torch.inf)
        if part is None:
            total = total.plus(scores)
            continue
        own = part[:, columns]
        scores.masked_fill_((own < 0)[:, None, None], -torch.inf)
        total = total.union(LogSumExp.by_part(scores, own, members(own, parts)))
    return total
