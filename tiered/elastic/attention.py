"""Attention weights of a few rows, and the attention that columns receive from a window of rows.

No map over all rows exists: what is asked of the window is a sum by column, made of a bounded part of it at a time.
"""

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from tiered.planning.elastic_costs import WindowChunk


def attention_weights(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
) -> Float32[Tensor, "batch heads rows length"]:
    """softmax(q·Kᵀ / √head_dim) in float32; 0 at keys that are masked."""
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    folded = queries.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    # Products in the model's own dtype: a float32 copy of all keys takes longer than the attention itself.
    weights = (folded @ keys.transpose(-1, -2)).float().mul_(head_dim**-0.5).view(batch, heads, rows, length)
    if key_mask is not None:
        weights.masked_fill_(~key_mask[:, None, None], -torch.inf)
    # In place: the weights are the largest tensor here.
    weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(dim=-1, keepdim=True))


def attention_received(
    queries: Float[Tensor, "batch heads window head_dim"],
    counts: Bool[Tensor, "batch window"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
    chunk: WindowChunk,
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
            asking = queries[some, group * sharing : (group + chunk.key_heads) * sharing]
            for row in range(0, window, chunk.rows):
                rows = slice(row, row + chunk.rows)
                weights = attention_weights(asking[:, :, rows], of_group, mask)
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
