"""Attention weights as a tensor, for policies and commit rules: softmax of q·k of some rows with cap, sinks and masks.

Attention itself materialises none. For many rows `chunks` bounds the weights that exist at a time.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.attention_scores import attention_scores, capped, check_attention, sink_scores


def masked_scores(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
    *,
    soft_cap: float | None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None,
    stop: Int[Tensor, "batch rows"] | None = None,
    exact: bool = True,
) -> tuple[Float32[Tensor, "batch heads rows length"], Float32[Tensor, "batch heads rows sinks"] | None]:
    """q·k / √head_dim of keys and of sinks, −inf at masked keys; `stop` as in `Limits`.

    `exact`: products in float32. Otherwise in the dtype of the arguments, because copying all keys to float32 takes
    longer than the attention itself.
    """
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    if exact:
        scores = attention_scores(queries, keys, soft_cap)
    else:
        check_attention(queries, keys)
        folded = queries.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
        scores = (folded @ keys.transpose(-1, -2)).float().mul_(head_dim**-0.5)
        scores = capped(scores.view(batch, heads, rows, length), soft_cap)
    if key_mask is not None:
        scores.masked_fill_(~key_mask[:, None, None], -torch.inf)
    if stop is not None:
        columns = torch.arange(length, dtype=stop.dtype, device=stop.device)
        scores.masked_fill_(columns >= stop[:, None, :, None], -torch.inf)
    return scores, None if sink_keys is None else sink_scores(queries, sink_keys, soft_cap)


def attention_exponentials(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
    *,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    stop: Int[Tensor, "batch rows"] | None = None,
    exact: bool = True,
) -> tuple[Float32[Tensor, "batch heads rows length"], Float32[Tensor, "batch heads rows one"] | None]:
    """exp(`masked_scores` − the row's largest) of each key, and its sum over the sinks. Every row must see a key."""
    scores, sinks = masked_scores(
        queries, keys, key_mask, soft_cap=soft_cap, sink_keys=sink_keys, stop=stop, exact=exact
    )
    # In place: the scores are the largest tensor here.
    peak = scores.amax(dim=-1, keepdim=True)
    if sinks is None:
        return scores.sub_(peak).exp_(), None
    peak = torch.maximum(peak, sinks.amax(dim=-1, keepdim=True))
    return scores.sub_(peak).exp_(), sinks.sub_(peak).exp_().sum(dim=-1, keepdim=True)


def attention_weights(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
    *,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    exact: bool = True,
) -> tuple[Float32[Tensor, "batch heads rows length"], Float32[Tensor, "batch heads rows"] | None]:
    """Softmax of `masked_scores`: the weight of each key, and of all sinks together. Every row must see a key."""
    weights, of_sinks = attention_exponentials(
        queries, keys, key_mask, soft_cap=soft_cap, sink_keys=sink_keys, exact=exact
    )
    total = weights.sum(dim=-1, keepdim=True)
    if of_sinks is None:
        return weights.div_(total), None
    total += of_sinks
    return weights.div_(total), of_sinks.div_(total)[..., 0]


def chunks(
    batch: int, heads: int, kv_heads: int, rows: int, *, sequences: int, heads_at_once: int, rows_at_once: int
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Slices of sequences, query heads, their key heads and rows of one chunk after another. `heads_at_once` is a
    multiple or a divisor of the number of heads that share keys."""
    sharing = heads // kv_heads
    for first in range(0, batch, sequences):
        some = slice(first, first + sequences)
        for head in range(0, heads, heads_at_once):
            keys = slice(head // sharing, -(-min(head + heads_at_once, heads) // sharing))
            for row in range(0, rows, rows_at_once):
                yield some, slice(head, head + heads_at_once), keys, slice(row, min(row + rows_at_once, rows))
