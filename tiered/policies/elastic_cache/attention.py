"""Attention weights of a few rows, and the attention that columns receive from a window of rows.

No map over all rows exists: what is asked of the window is a sum by column, made of a bounded part of it at a time.
"""

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.proxy_scores import capped, sink_scores
from tiered.policies.elastic_cache.costs import WindowChunk


def attention_weights(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
    *,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    visible: Int[Tensor, "batch rows"] | None = None,
) -> Float32[Tensor, "batch heads rows length"]:
    """softmax(q·Kᵀ / √head_dim) in float32; 0 at keys that are masked. The last three as in `capped_attention_ref.py`;
    what sinks get is left out, so that the weights sum to less than 1."""
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    folded = queries.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    # Products in the model's own dtype: a float32 copy of all keys takes longer than the attention itself.
    weights = (folded @ keys.transpose(-1, -2)).float().mul_(head_dim**-0.5).view(batch, heads, rows, length)
    if soft_cap is not None:
        capped(weights, soft_cap)
    if key_mask is not None:
        weights.masked_fill_(~key_mask[:, None, None], -torch.inf)
    if visible is not None:
        columns = torch.arange(length, dtype=visible.dtype, device=visible.device)
        weights.masked_fill_(columns >= visible[:, None, :, None], -torch.inf)
    # In place: the weights are the largest tensor here.
    peak = weights.amax(dim=-1, keepdim=True)
    if sink_keys is None:
        weights.sub_(peak).exp_()
        return weights.div_(weights.sum(dim=-1, keepdim=True))
    sinks = sink_scores(queries, sink_keys, soft_cap)
    peak = torch.maximum(peak, sinks.amax(dim=-1, keepdim=True))
    total = sinks.sub_(peak).exp_().sum(dim=-1, keepdim=True)
    weights.sub_(peak).exp_()
    return weights.div_(total.add_(weights.sum(dim=-1, keepdim=True)))


def attention_received(
    queries: Float[Tensor, "batch heads window head_dim"],
    counts: Bool[Tensor, "batch window"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
    chunk: WindowChunk,
    *,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Float32[Tensor, "batch length"]:
    """Sum over all heads and over the rows that count of the weight that each column gets; `chunk` goes at a time."""
    batch, heads, window, _ = queries.shape
    kv_heads = keys.shape[1]
    sharing = heads // kv_heads
    received = queries.new_zeros(batch, keys.shape[2], dtype=torch.float32)
    for first in range(0, batch, chunk.sequences):
        some = slice(first, first + chunk.sequences)
        mask = None if key_mask is None else key_mask[some]
        for group in range(0, kv_heads, chunk.key_heads):
            of_group = keys[some, group : group + chunk.key_heads]
            heads_of_group = slice(group * sharing, (group + chunk.key_heads) * sharing)
            asking = queries[some, heads_of_group]
            sinks = None if sink_keys is None else sink_keys[heads_of_group]
            for row in range(0, window, chunk.rows):
                rows = slice(row, row + chunk.rows)
                weights = attention_weights(asking[:, :, rows], of_group, mask, soft_cap=soft_cap, sink_keys=sinks)
                weights.mul_(counts[some, None, rows, None])
                received[some] += weights.sum(dim=(1, 2))
                del weights  # else the next chunk's would stand beside them
    return received


def similarity(
    past: Float32[Tensor, "batch heads rows length"], now: Float32[Tensor, "batch heads rows length"]
) -> Float32[Tensor, "batch rows"]:
    """Cosine of two sets of attention weights, over the keys, mean over the heads."""
    norms = torch.linalg.vector_norm(past, dim=-1).mul_(torch.linalg.vector_norm(now, dim=-1))
    return ((past * now).sum(dim=-1) / norms).mean(dim=1)
