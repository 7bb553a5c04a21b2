"""Attention with soft-capped scores, sink tokens and rows that see a part of the keys: the oracle, in plain torch."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.kernels.proxy_scores import capped, check_attention

# 4 MiB of float32: scores exist for so many pairs of a row and a key at a time, or for one head of one sequence.
PAIRS_AT_ONCE = 1 << 20


def capped_attention(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    values: Float[Tensor, "batch kv_heads length head_dim"],
    *,
    soft_cap: float,
    sink_keys: Float[Tensor, "heads sinks head_dim"],
    sink_values: Float[Tensor, "heads sinks head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    visible: Int[Tensor, "batch rows"] | None = None,
) -> Float[Tensor, "batch heads rows head_dim"]:
    """softmax(c · tanh(q·k / (c √head_dim))) · v over the sinks and the keys that a row may see, in float32.

    Args:
        queries, keys, values: as cached, rotated. Head h reads key head h // (heads / kv_heads).
        soft_cap: c.
        sink_keys, sink_values: learned tokens that every row attends to, as they are; there may be none.
        key_mask: False at columns that nothing may attend to.
        visible: columns, from the first on, that each row may attend to; None: all. A row that may attend to nothing
            at all, sinks included, gets zeros.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_attention(queries, keys)
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    sharing = heads // kv_heads
    mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
    # Rows count as the next power of two, so that few sizes of a part are to be booked. Keys of other dtypes are copied
    # for a chunk: as many elements as there are pairs at the most.
    least = 1 if keys.dtype == torch.float32 else -(-head_dim // sharing)
    pairs = sharing * max(1 << max(0, rows - 1).bit_length(), least) * max(1, length)
    sequences = max(1, PAIRS_AT_ONCE // (kv_heads * pairs))
    groups = kv_heads if sequences > 1 else max(1, PAIRS_AT_ONCE // pairs)
    for first in range(0, batch, sequences):
        some = slice(first, first + sequences)
        hidden = _hidden(
            length, None if key_mask is None else key_mask[some], None if visible is None else visible[some]
        )
        for group in range(0, kv_heads, groups):
            of_keys = slice(group, group + groups)
            of_heads = slice(group * sharing, (group + groups) * sharing)
            mixed[some, of_heads] = _mixed(
                queries[some, of_heads], keys[some, of_keys], values[some, of_keys],
                sink_keys[of_heads], sink_values[of_heads], soft_cap, hidden,
            )  # fmt: skip
    return mixed


def _mixed(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    values: Float[Tensor, "batch kv_heads length head_dim"],
    sink_keys: Float[Tensor, "heads sinks head_dim"],
    sink_values: Float[Tensor, "heads sinks head_dim"],
    soft_cap: float,
    hidden: Bool[Tensor, "batch 1 #rows length"] | None,
) -> Float[Tensor, "batch heads rows head_dim"]:
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    scaled = queries.float() * head_dim**-0.5
    # The heads that share keys are rows of one product: no key is repeated.
    folded = scaled.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    scores = capped(folded @ keys.float().transpose(-1, -2), soft_cap).view(batch, heads, rows, length)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    sinks = capped(scaled @ sink_keys.float().transpose(-1, -2), soft_cap)
    peak = scores.amax(-1, keepdim=True)
    if sinks.shape[-1]:
        peak = torch.maximum(peak, sinks.amax(-1, keepdim=True))
    peak.masked_fill_(peak == -torch.inf, 0.0)
    scores.sub_(peak).exp_()
    sinks.sub_(peak).exp_()
    total = scores.sum(-1, keepdim=True) + sinks.sum(-1, keepdim=True)
    total.masked_fill_(total == 0, 1.0)
    of_keys = scores.view_as(folded[..., :1].expand(*folded.shape[:3], length)) @ values.float()
    return ((of_keys.view(batch, heads, rows, head_dim) + sinks @ sink_values.float()) / total).to(queries.dtype)


def _hidden(
    length: int, key_mask: Bool[Tensor, "batch length"] | None, visible: Int[Tensor, "batch rows"] | None
) -> Bool[Tensor, "batch 1 #rows length"] | None:
    """True at the keys that a row may not see; None where all see all."""
    if visible is None:
        return None if key_mask is None else ~key_mask[:, None, None]
    beyond = torch.arange(length, device=visible.device) >= visible[:, None, :, None]
    return beyond if key_mask is None else beyond.logical_or_(~key_mask[:, None, None])
