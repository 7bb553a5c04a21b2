"""How much attention centroids pay in all: the oracle, in plain torch."""

from jaxtyping import Bool, Float
from torch import Tensor

from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_scores import check_attention, proxy_scores

SCORES_AT_ONCE = 1 << 19  # 2 MiB of float32: scores are read three times while they lie in the cache


def proxy_attention(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
) -> LogSumExp:
    """Log-sum-exp over all keys of the scores q·k / √head_dim, by batch, head and cluster, in float32.

    Scores exist for a chunk of keys at a time; those of chosen columns come from `proxy_scores`, and their
    probabilities from `LogSumExp.log_probability`.

    Args:
        queries: of the centroids, rotated at the positions of their medoids.
        keys: as cached, rotated. Head h reads key head h // (heads / kv_heads).
        key_mask: False at columns that nothing may attend to.
        soft_cap: c where scores s count as c · tanh(s / c); None: as they are.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_attention(queries, keys)
    queries = queries.float()
    total = LogSumExp.empty(queries[..., 0])
    chunk = max(16, SCORES_AT_ONCE // max(1, queries[..., 0].numel()))
    for first in range(0, keys.shape[2], chunk):
        scores = proxy_scores(queries, keys[:, :, first : first + chunk], soft_cap)
        if key_mask is not None:
            scores.masked_fill_(~key_mask[:, None, None, first : first + chunk], -float("inf"))
        total = total.plus(scores)
    return total
