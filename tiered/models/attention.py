"""Attention of some rows' queries over every key in a layer's store."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.kernels.block_attention_ref import block_attention
from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows

# Rows of a block or an update. With more rows arithmetic sets the pace: columns in parts gain nothing, and torch's
# kernels use the fast units of each GPU.
MOST_ROWS = 512


def attend(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"] | CodedRows,
    values: Float[Tensor, "batch kv_heads length head_dim"] | CodedRows,
    key_mask: Bool[Tensor, "batch 1 1 length"] | None = None,
    visible: Int[Tensor, "batch #rows"] | None = None,
    first: Int[Tensor, " batch"] | None = None,
    since: Int[Tensor, "batch #rows"] | None = None,
    **softened: Any,
) -> Float[Tensor, "batch rows heads_width"]:
    """Attention, heads concatenated: by `block_attention` if it is a kernel or torch cannot compute it, else by torch.
    `softened`: `soft_cap`, `sink_keys` and `sink_values` of `block_attention`; other arguments as in
    `DiffusionModel.attend`."""
    attention = for_device(block_attention, queries.device)
    plain = visible is None and since is None and all(value is None for value in softened.values())
    by_torch = plain and (attention is block_attention or queries.shape[2] > MOST_ROWS)
    if by_torch and isinstance(keys, Tensor) and isinstance(values, Tensor):
        return _by_torch(queries, keys, values, key_mask)
    begin = since if first is None else first[:, None]
    if begin is not None and since is not None:
        begin = torch.maximum(begin, since)
    mixed, _ = attention(
        queries,
        keys,
        values,
        key_mask=None if key_mask is None or first is not None else key_mask[:, 0, 0],
        first=begin,
        visible=visible,
        **softened,
    )
    return mixed.transpose(1, 2).flatten(2)


def _by_torch(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    values: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch 1 1 length"] | None,
) -> Float[Tensor, "batch rows heads_width"]:
    batch, heads, rows, head_dim = queries.shape
    kv_heads = keys.shape[1]
    # Grouped queries: the heads that share a key head become more rows of that head, so no key is ever copied.
    folded = queries.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=key_mask)
    # Backends return heads or rows as the outer axis in memory: an axis can be split in either.
    apart = mixed.unflatten(2, (heads // kv_heads, rows))
    return apart.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads * head_dim)
