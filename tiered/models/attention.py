"""Attention of some rows' queries over parts of keys and values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.kernels.block_attention_ref import attention_apart, block_attention
from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import Columns, Heads, KeyValue
from tiered.kernels.keys_of_values import Keys
from tiered.kernels.log_sum_exp import LogSumExp, finite
from tiered.kernels.store_table import StoreTable

# Rows of a block or an update. With more rows arithmetic is the limit: splitting columns gains nothing, and torch's
# kernels use the fast units of each GPU.
MOST_ROWS = 512
# Output of some rows over a part, [batch, heads, rows, head_dim], and the log-sum-exp of their scores.
PartOutput = tuple[Tensor, LogSumExp]
Joined = Float[Tensor, "batch rows heads_width"]  # outputs of rows, heads concatenated


@dataclass(frozen=True, slots=True)
class Limits:
    """The columns of a part that rows read; None for all of them.

    Attributes:
        key_mask: False at columns that no row reads.
        pads: columns in front of which `key_mask` is False, if it is False nowhere else.
        start, stop: first column that each row reads, and the column behind its last.
    """

    key_mask: Bool[Tensor, "batch length"] | None = None
    pads: Int[Tensor, " batch"] | None = None
    start: Int[Tensor, "batch rows"] | None = None
    stop: Int[Tensor, "batch rows"] | None = None


def attend(
    queries: Heads, keys: Keys, values: KeyValue, limits: Limits, *, scale: float | None = None, **softened: Any
) -> Joined:
    """Attention over one part, heads concatenated. `block_attention` computes it if it is a kernel or torch cannot,
    otherwise torch. `scale`, and `soft_cap`, `sink_keys` and `sink_values` in `softened`: as in `block_attention`."""
    reference = for_device(block_attention, queries.device) is block_attention
    plain = all(value is None for value in (limits.start, limits.stop, *softened.values()))
    by_torch = plain and (reference or queries.shape[2] > MOST_ROWS)
    if by_torch and isinstance(keys, Tensor) and isinstance(values, Tensor):
        return _by_torch(queries, keys, values, limits.key_mask, scale)
    return heads_joined(attend_part(queries, keys, values, limits, scale=scale, **softened)[0])


def attend_apart(queries: Heads, table: StoreTable, layer: int, **softened: Any) -> Joined:
    """Attention of rows of several calls, each over its own stores, heads concatenated; `scale` and others in
    `softened`."""
    return heads_joined(for_device(attention_apart, queries.device)(queries, table, layer, **softened))


def attend_part(queries: Heads, keys: Keys, values: KeyValue, limits: Limits, **softened: Any) -> PartOutput:
    """Attention over one of several parts, `scale` in `softened`, with the log-sum-exp for a merge with the others."""
    start, pads = limits.start, None if limits.pads is None else limits.pads[:, None]
    if pads is not None:
        start = pads if start is None else torch.maximum(pads, start)
    mask = limits.key_mask if pads is None else None
    attention = for_device(block_attention, queries.device)
    return attention(queries, keys, values, key_mask=mask, start=start, stop=limits.stop, **softened)


def merged(part: PartOutput, others: Iterable[PartOutput]) -> Heads:
    """Output of rows that read all of these parts, in float32."""
    total, sums = part[0].float(), part[1]
    for mixed, of_part in others:
        peak = torch.maximum(sums.peak, of_part.peak)
        before, added = (of.mass * (of.peak - finite(peak)).exp() for of in (sums, of_part))
        mass = before + added
        share = added / mass.masked_fill(mass == 0, 1.0)
        total, sums = total.lerp(mixed.float(), share[..., None]), LogSumExp(peak, mass)
    return total


def heads_joined(mixed: Heads) -> Joined:
    return mixed.transpose(1, 2).flatten(2)


def _by_torch(
    queries: Heads,
    keys: Columns,
    values: Columns,
    key_mask: Bool[Tensor, "batch length"] | None,
    scale: float | None,
) -> Joined:
    batch, heads, rows, head_dim = queries.shape
    kv_heads = keys.shape[1]
    # Grouped queries: heads that share a key head become more rows of that head, so no key is ever copied.
    folded = queries.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    mask = None if key_mask is None else key_mask[:, None, None]
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    # Backends return heads or rows as the outer axis in memory: an axis can be split in either.
    apart = mixed.unflatten(2, (heads // kv_heads, rows))
    return apart.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads * head_dim)
