"""Attention scores of centroids over some keys: a matrix product, so plain torch serves every device."""

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows


def proxy_scores(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads columns head_dim"],
    soft_cap: float | None = None,
) -> Float32[Tensor, "batch heads clusters columns"]:
    """s = q·k / √head_dim, in float32 whatever the dtypes, or c · tanh(s / c) where `soft_cap` is c. Head h reads key
    head h // (heads / kv_heads).

    Raises:
        ValueError: shapes that do not go together (see `check_attention`).
    """
    check_attention(queries, keys)
    batch, heads, clusters, head_dim = queries.shape
    kv_heads, columns = keys.shape[1:3]
    # The heads that share keys are rows of one product: no key is repeated.
    grouped = queries.float().reshape(batch, kv_heads, heads // kv_heads * clusters, head_dim)
    scores = (grouped @ keys.float().transpose(-1, -2)).mul_(head_dim**-0.5)
    scores = scores.view(batch, heads, clusters, columns)
    return scores if soft_cap is None else capped(scores, soft_cap)


def keys_at(
    keys: Float[Tensor, "batch kv_heads length head_dim"], index: Int[Tensor, "batch columns"] | None
) -> Float[Tensor, "batch kv_heads columns head_dim"]:
    """The `keys` at the columns of `index`, in its order; None: all of them."""
    if index is None:
        return keys
    sequences = torch.arange(len(keys), device=keys.device)[:, None]
    return keys[sequences, :, index].transpose(1, 2)


def sink_scores(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    sink_keys: Float[Tensor, "heads sinks head_dim"],
    soft_cap: float | None = None,
) -> Float32[Tensor, "batch heads clusters sinks"]:
    """`proxy_scores` of the sinks, of which every head has its own and every sequence the same.

    Raises:
        ValueError: sinks of other heads, or of another head_dim.
    """
    heads, _, head_dim = sink_keys.shape
    if queries.shape[1] != heads or queries.shape[3] != head_dim:
        raise ValueError(
            f"queries {tuple(queries.shape)} do not fit sink_keys {tuple(sink_keys.shape)}: heads and head_dim must be "
            "equal"
        )
    return proxy_scores(queries, sink_keys[None].expand(len(queries), -1, -1, -1), soft_cap)


def capped(scores: Float[Tensor, "*pairs"], soft_cap: float) -> Float[Tensor, "*pairs"]:
    """c · tanh(scores / c), in place."""
    return scores.div_(soft_cap).tanh_().mul_(soft_cap)


def check_attention(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads columns head_dim"] | CodedRows,
) -> None:
    """Raise `ValueError` unless batch and head_dim agree and the heads divide evenly over the key heads."""
    if queries.shape[0] != keys.shape[0] or queries.shape[3] != keys.shape[3] or queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"queries {tuple(queries.shape)} do not fit keys {tuple(keys.shape)}: batch and head_dim must be equal, "
            "and heads a multiple of the key heads"
        )
