"""The attention of rows on each span of columns, and on sinks."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tiered.forward.attention_weights import attention_weights, chunks
from tiered.models.shape import ModelShape

# Pairs of a row and a key that have scores at one time: 1 MiB of float32, or one row of the heads that share keys.
PAIRS_AT_ONCE = 1 << 18

_FLOAT32 = 4


def attention_mass(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    spans: Sequence[tuple[int, int]],
    *,
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Float64[Tensor, "batch places"]:
    """Attention weights summed over heads and rows: on the columns of each span, and last on the sinks.

    If the spans cover all columns, the sums of a sequence add up to heads · rows.

    Args:
        queries, keys: as cached, rotated. Head h reads key head h // (heads / kv_heads).
        spans: first column and the one behind the last, by span.
        key_mask: False at columns that no row may attend to; None for no such column.
        soft_cap: c if scores s count as c · tanh(s / c); None for no cap.
        sink_keys: learned keys that every row attends to beside those of the canvas; None for no sinks.

    Raises:
        ValueError: shapes that do not go together.
    """
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    sharing = heads // kv_heads
    at_once = max(1, PAIRS_AT_ONCE // (sharing * length))
    groups = max(1, PAIRS_AT_ONCE // (length * max(sharing * min(rows, at_once), head_dim)))
    sums = torch.zeros(batch, len(spans) + 1, dtype=torch.float64, device=queries.device)
    for some, of_heads, of_keys, part in chunks(
        batch, heads, kv_heads, rows, sequences=1, heads_at_once=groups * sharing, rows_at_once=at_once
    ):
        weights, of_sinks = attention_weights(
            queries[some, of_heads, part],
            keys[some, of_keys],
            None if key_mask is None else key_mask[some],
            soft_cap=soft_cap,
            sink_keys=None if sink_keys is None else sink_keys[of_heads],
        )
        parts = [weights[..., first:behind].sum(dim=-1) for first, behind in spans]
        parts.append(torch.zeros_like(weights[..., 0]) if of_sinks is None else of_sinks)
        sums[some] += torch.stack(parts, dim=-1).sum(dim=(1, 2), dtype=torch.float64)
        del weights, of_sinks, parts  # freed before those of the next chunk are made
    return sums


def mass_bytes(shape: ModelShape, *, length: int, dtype: str) -> int:
    """Bytes of the largest temporaries of `attention_mass` over a canvas of `length` columns: the scores, and keys in
    float32. Queries in float32 take less than their rotation, which a part of a step already counts."""
    sharing = shape.heads // shape.kv_heads
    scores = max(min(PAIRS_AT_ONCE, shape.heads * length * length), sharing * length)
    keys = max(min(PAIRS_AT_ONCE, shape.kv_width * length), shape.head_dim * length) if dtype != "float32" else 0
    return _FLOAT32 * (scores + keys)
