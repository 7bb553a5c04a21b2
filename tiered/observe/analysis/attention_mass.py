"""How much of some rows' attention falls on each of some spans of columns, and on sinks."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tiered.core.rows import Rows
from tiered.kernels.proxy_scores import proxy_scores, sink_scores
from tiered.models.shape import ModelShape

# 1 MiB of float32: scores exist for so many pairs of a row and a key at a time, or for one row of the heads that share
# their keys.
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
    """Attention weights summed over heads and rows: for each of `spans` those of its columns, and last of the sinks.

    Where the spans cover all columns, the sums of a sequence add up to heads · rows.

    Args:
        queries, keys: as cached, rotated. Head h reads key head h // (heads / kv_heads).
        spans: first column and the one behind the last, by span.
        key_mask: False at columns that nothing may attend to.
        soft_cap: c where scores s count as c · tanh(s / c); None: as they are.
        sink_keys: learned keys that every row attends to beside those of the canvas; None: there are none.

    Raises:
        ValueError: shapes that do not go together.
    """
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    sharing = heads // kv_heads
    row_parts = Rows.span(0, rows).parts(max(1, PAIRS_AT_ONCE // (sharing * length)))
    longest = row_parts[0].stop if row_parts else 0
    groups = max(1, PAIRS_AT_ONCE // (length * max(sharing * longest, head_dim)))
    sums = torch.zeros(batch, len(spans) + 1, dtype=torch.float64, device=queries.device)
    for sequence in range(batch):
        some = slice(sequence, sequence + 1)
        hidden = None if key_mask is None else ~key_mask[some, None, None]
        for group in range(0, kv_heads, groups):
            of_heads = slice(group * sharing, (group + groups) * sharing)
            for part in row_parts:
                mass = _mass(
                    queries[some, of_heads, part], keys[some, group : group + groups], spans, hidden, soft_cap,
                    None if sink_keys is None else sink_keys[of_heads],
                )  # fmt: skip
                sums[sequence] += mass.sum(dim=(0, 1, 2), dtype=torch.float64)
    return sums


def mass_bytes(shape: ModelShape, *, length: int, dtype: str) -> int:
    """Bytes of the largest temporaries of `attention_mass` over a canvas of `length` columns: the scores, and keys in
    float32. Queries in float32 are fewer than a rotation of them takes, for which a part of a pass has room."""
    sharing = shape.heads // shape.kv_heads
    scores = max(min(PAIRS_AT_ONCE, shape.heads * length * length), sharing * length)
    keys = max(min(PAIRS_AT_ONCE, shape.kv_width * length), shape.head_dim * length) if dtype != "float32" else 0
    return _FLOAT32 * (scores + keys)


def _mass(
    queries: Float[Tensor, "1 heads rows head_dim"],
    keys: Float[Tensor, "1 kv_heads length head_dim"],
    spans: Sequence[tuple[int, int]],
    hidden: Bool[Tensor, "1 1 1 length"] | None,
    soft_cap: float | None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None,
) -> Float[Tensor, "1 heads rows places"]:
    """The softmax's sums by place; scores turn into weights where they lie."""
    scores = proxy_scores(queries, keys, soft_cap)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    sinks = scores[..., :0] if sink_keys is None else sink_scores(queries, sink_keys, soft_cap)
    peak = scores.amax(dim=-1, keepdim=True)  # of the keys alone: a row sees itself, so there is one
    if sinks.shape[-1]:
        peak = torch.maximum(peak, sinks.amax(dim=-1, keepdim=True))
    scores.sub_(peak).exp_()
    total = scores.sum(dim=-1)
    of_sinks = (sinks - peak).exp_().sum(dim=-1)
    parts = [scores[..., first:behind].sum(dim=-1) for first, behind in spans]
    return torch.stack([*parts, of_sinks], dim=-1).div_((total + of_sinks)[..., None])
