"""Attention of some rows' queries over every key in a layer's store."""

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def attend(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    values: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch 1 1 length"] | None,
) -> Float[Tensor, "batch rows width"]:
    """Bidirectional attention, heads concatenated; `key_mask` is False at keys that no row may read."""
    batch, heads, rows, head_dim = queries.shape
    kv_heads = keys.shape[1]
    # Grouped queries: the heads that share a key head become more rows of that head, so no key is ever copied.
    folded = queries.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=key_mask)
    # Backends answer with heads or with rows as the outer axis in memory: an axis can be split in either.
    apart = mixed.unflatten(2, (heads // kv_heads, rows))
    return apart.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads * head_dim)
