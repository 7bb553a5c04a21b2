"""Capped attention in Triton: one pass over the keys, in which weights are summed as they come."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.kernels.launch import Compilation, launch
from tiered.kernels.proxy_attention import attention_scores, elements_block, narrow, soft_capped, upcast
from tiered.kernels.proxy_scores import check_attention


@triton.jit
def _capped_attention(
    queries,
    keys,
    values,
    sink_keys,
    sink_values,
    key_mask,
    visible,
    mixed,
    query_batch,
    query_head,
    query_row,
    query_element,
    key_batch,
    key_head,
    key_column,
    key_element,
    value_batch,
    value_head,
    value_column,
    value_element,
    mask_batch,
    mask_column,
    visible_batch,
    visible_row,
    kv_heads,
    group,
    rows,
    length,
    head_dim,
    sinks,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    PARTLY: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    # The rows of all heads that share a key head are one matrix: a tile of keys and values is read once for all.
    folded = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    there = folded < group * rows
    head = kv_head * group + folded // rows
    row = folded % rows
    element = tl.arange(0, BLOCK_ELEMENTS)
    filled = element < head_dim
    own = there[:, None] & filled[None, :]
    query_at = batch * query_batch + head * query_head + row * query_row
    query = tl.load(queries + query_at[:, None] + (element * query_element)[None, :], own, other=0.0)
    stop = length
    limit = tl.zeros([BLOCK_ROWS], tl.int32)
    if PARTLY:
        limit = tl.load(visible + batch * visible_batch + row * visible_row, there, other=0).to(tl.int32)
        stop = tl.minimum(length, tl.max(limit, 0))
    peak = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_ROWS], tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_ELEMENTS], tl.float32)
    for sink in range(sinks):
        sink_at = ((head * sinks + sink) * head_dim)[:, None] + element[None, :]
        products = query.to(tl.float32) * tl.load(sink_keys + sink_at, own, other=0.0).to(tl.float32)
        score = soft_capped(tl.sum(products, 1) * scale, soft_cap)
        grown = tl.maximum(peak, score)
        faded, weight = tl.exp(peak - grown), tl.exp(score - grown)
        peak, mass = grown, mass * faded + weight
        value = tl.load(sink_values + sink_at, own, other=0.0).to(tl.float32)
        total = total * faded[:, None] + weight[:, None] * value
    key_start = keys + batch * key_batch + kv_head * key_head + (element * key_element)[None, :]
    value_start = values + batch * value_batch + kv_head * value_head + (element * value_element)[None, :]
    for first in range(0, stop, BLOCK_KEYS):
        column = first + tl.arange(0, BLOCK_KEYS)
        seen = column < stop
        if MASKED:
            seen &= tl.load(key_mask + batch * mask_batch + column * mask_column, seen, other=0) != 0
        place = column.to(tl.int64)[:, None]
        keyed = seen[:, None] & filled[None, :]
        key = tl.load(key_start + place * key_column, keyed, other=0.0)
        scores = attention_scores(query, key, scale, soft_cap, True, UPCAST)
        shown = there[:, None] & seen[None, :]
        if PARTLY:
            shown &= column[None, :] < limit[:, None]
        scores = tl.where(shown, scores, -float("inf"))
        grown = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(grown == -float("inf"), 0.0, grown)
        faded, weights = tl.exp(peak - base), tl.exp(scores - base[:, None])
        peak, mass = grown, mass * faded + tl.sum(weights, 1)
        value = tl.load(value_start + place * value_column, keyed, other=0.0)
        if UPCAST:
            value = value.to(tl.float32)
        total = total * faded[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    total /= tl.where(mass > 0, mass, 1.0)[:, None]
    mixed_at = ((batch * kv_heads + kv_head) * group * rows + folded) * head_dim
    tl.store(mixed + mixed_at[:, None] + element[None, :], total.to(mixed.dtype.element_ty), own)


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
    """As in capped_attention_ref.py. Products of 16-bit tensors take weights of 16 bits."""
    check_attention(queries, keys)
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if mixed.numel() == 0:
        return mixed
    block = 64 if narrow(queries, keys) else 32
    # Where nothing is hidden the kernel reads no mask; any pointer does.
    mask = queries if key_mask is None else key_mask.view(torch.uint8)
    limits = queries if visible is None else visible.expand(batch, rows)
    launch(
        _capped_attention,
        (-(-group * rows // block), batch * kv_heads),
        queries,
        keys,
        values,
        sink_keys.contiguous(),
        sink_values.contiguous(),
        mask,
        limits,
        mixed,
        *queries.stride(),
        *keys.stride(),
        *values.stride(),
        *mask.stride()[:2],
        *limits.stride()[:2],
        kv_heads,
        group,
        rows,
        length,
        head_dim,
        sink_keys.shape[1],
        head_dim**-0.5,
        soft_cap,
        MASKED=key_mask is not None,
        PARTLY=visible is not None,
        UPCAST=upcast(queries, keys) or upcast(queries, values),
        BLOCK_ROWS=block,
        BLOCK_KEYS=block,
        BLOCK_ELEMENTS=elements_block(head_dim),
        on=keys,
    )
    return mixed


_STRIDES = "query_batch query_head query_row key_batch key_head key_column value_batch value_head value_column"
_SIZES = "mask_batch mask_column visible_batch visible_row kv_heads group rows length head_dim sinks"
COMPILATIONS = tuple(
    Compilation(
        kernel=_capped_attention,
        types={
            "queries keys values sink_keys sink_values mixed": f"*{dtype}",
            "key_mask": "*u8",
            "visible": "*i64",
            f"{_STRIDES} {_SIZES}": "i32",
            "scale soft_cap": "fp32",
        },
        constexprs={
            "query_element": 1,
            "key_element": 1,
            "value_element": 1,
            "MASKED": hidden,
            "PARTLY": hidden,
            "UPCAST": False,
            "BLOCK_ROWS": block,
            "BLOCK_KEYS": block,
            "BLOCK_ELEMENTS": 128,
        },
        spills=True,
    )
    for dtype, block, hidden in [("bf16", 64, True), ("bf16", 64, False), ("fp32", 32, True)]
)
