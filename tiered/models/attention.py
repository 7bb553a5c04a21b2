"""Attention of some rows' queries over every key in a layer's store."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.kernels.block_attention_ref import block_attention
from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows

# Of a sequence, which are a block or an update. With more, arithmetic sets the pace: columns in parts gain nothing, and
# torch's kernels use what each GPU has for that.
MOST_ROWS = 512


def attend(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"] | CodedRows,
    values: Float[Tensor, "batch kv_heads length head_dim"] | CodedRows,
    key_mask: Bool[Tensor, "batch 1 1 length"] | None = None,
    visible: Int[Tensor, "batch #rows"] | None = None,
    first: Int[Tensor, " batch"] | None = None,
    since: Int[Tensor, "batch #rows"] | None = None,
    *,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    sink_values: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Float[Tensor, "batch rows heads_width"]:
    """Bidirectional attention, heads concatenated: by `block_attention` where it is a kernel, or where torch has
    nothing that does; else by torch.

    Args:
        key_mask: False at keys that no row may read.
        visible, soft_cap, sink_keys, sink_values: as for `block_attention`.
        first: where `key_mask` is False in front of these columns alone: they say the same without a mask.
        since: the first column that each row may read, whatever the mask says; None: 0.
    """
    attention = for_device(block_attention, queries.device)
    plain = soft_cap is None and sink_keys is None and visible is None and since is None
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
        soft_cap=soft_cap,
        sink_keys=sink_keys,
        sink_values=sink_values,
        key_mask=None if key_mask is None or first is not None else key_mask[:, 0, 0],
        first=begin,
        visible=visible,
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
    # Backends answer with heads or with rows as the outer axis in memory: an axis can be split in either.
    apart = mixed.unflatten(2, (heads // kv_heads, rows))
    return apart.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads * head_dim)
