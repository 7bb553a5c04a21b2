"""Attention scores of centroids over some keys: a matrix product, so plain torch serves every device."""

from jaxtyping import Float, Float32
from torch import Tensor


def proxy_scores(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads columns head_dim"],
) -> Float32[Tensor, "batch heads clusters columns"]:
    """q·k / √head_dim, in float32 whatever the dtypes. Head h reads key head h // (heads / kv_heads).

    Raises:
        ValueError: shapes that do not go together (see `check_attention`).
    """
    check_attention(queries, keys)
    batch, heads, clusters, head_dim = queries.shape
    kv_heads, columns = keys.shape[1:3]
    # The heads that share keys are rows of one product: no key is repeated.
    grouped = queries.float().reshape(batch, kv_heads, heads // kv_heads * clusters, head_dim)
    scores = (grouped @ keys.float().transpose(-1, -2)).mul_(head_dim**-0.5)
    return scores.view(batch, heads, clusters, columns)


def check_attention(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads columns head_dim"],
) -> None:
    """Raise `ValueError` unless batch and head_dim agree and the heads divide evenly over the key heads."""
    if queries.shape[0] != keys.shape[0] or queries.shape[3] != keys.shape[3] or queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"queries {tuple(queries.shape)} do not fit keys {tuple(keys.shape)}: batch and head_dim must be equal, "
            "and heads a multiple of the key heads"
        )
