"""Attention scores of some queries over some keys: a matrix product, so plain torch serves every device."""

from jaxtyping import Float, Float32
from torch import Tensor

from tiered.kernels.coded_rows import Heads
from tiered.kernels.keys_of_values import Keys


def attention_scores(
    queries: Heads, keys: Float[Tensor, "batch kv_heads columns head_dim"], soft_cap: float | None
) -> Float32[Tensor, "batch heads rows columns"]:
    """s = q·k / √head_dim, in float32 for all dtypes, or c · tanh(s / c) if `soft_cap` is c. Query head h uses key head
    h // (heads / kv_heads). Raises as `check_attention`."""
    check_attention(queries, keys)
    batch, heads, rows, head_dim = queries.shape
    kv_heads, columns = keys.shape[1:3]
    # Heads that share keys are rows of one product, so no key is repeated.
    grouped = queries.float().reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    scores = (grouped @ keys.float().transpose(-1, -2)).mul_(head_dim**-0.5)
    scores = scores.view(batch, heads, rows, columns)
    return capped(scores, soft_cap)


def sink_scores(
    queries: Heads, sink_keys: Float[Tensor, "heads sinks head_dim"], soft_cap: float | None
) -> Float32[Tensor, "batch heads rows sinks"]:
    """`attention_scores` of the sinks. Every head has its own sinks, and all sequences share them. Raises `ValueError`
    if the sinks have another number of heads or another head_dim."""
    heads, _, head_dim = sink_keys.shape
    if queries.shape[1] != heads or queries.shape[3] != head_dim:
        raise ValueError(
            f"queries {tuple(queries.shape)} do not fit sink_keys {tuple(sink_keys.shape)}: heads and head_dim must be "
            "equal"
        )
    return attention_scores(queries, sink_keys[None].expand(len(queries), -1, -1, -1), soft_cap)


def capped(scores: Float[Tensor, "*pairs"], soft_cap: float | None) -> Float[Tensor, "*pairs"]:
    """c · tanh(scores / c), in place; the scores unchanged if `soft_cap` is None."""
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def check_attention(queries: Heads, keys: Keys) -> None:
    """Raise `ValueError` unless batch and head_dim agree and the heads divide evenly over the key heads."""
    if queries.shape[0] != keys.shape[0] or queries.shape[3] != keys.shape[3] or queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"queries {tuple(queries.shape)} do not fit keys {tuple(keys.shape)}: batch and head_dim must be equal, "
            "and heads a multiple of the key heads"
        )
