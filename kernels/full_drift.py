"""Drift from all keys of then and now, in Triton: a program takes the centroids of one head over a part of the keys."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from tiered.kernels.compilation import Compilation
from tiered.kernels.full_drift_ref import with_sinks
from tiered.kernels.launch import launch
from tiered.kernels.proxy_attention import (
    LEAST_KEYS,
    PROGRAMS,
    attention_scores,
    elements_block,
    narrow,
    proxy_attention,
    upcast,
)
from tiered.kernels.proxy_drift import kl_terms
from tiered.kernels.proxy_scores import check_attention, sink_scores


@triton.jit
def _full_drift(
    queries,
    keys,
    last_keys,
    key_mask,
    new_peaks,
    new_masses,
    old_peaks,
    old_masses,
    drift,
    query_batch,
    query_head,
    query_cluster,
    query_element,
    key_batch,
    key_head,
    key_column,
    key_element,
    last_batch,
    last_head,
    last_column,
    last_element,
    mask_batch,
    mask_column,
    heads,
    group,
    clusters,
    length,
    head_dim,
    span,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    cluster = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
    batch = (tl.program_id(2) // heads).to(tl.int64)
    head = (tl.program_id(2) % heads).to(tl.int64)
    there = cluster < clusters
    element = tl.arange(0, BLOCK_ELEMENTS)
    filled = element < head_dim
    query_at = batch * query_batch + head * query_head + cluster * query_cluster
    query = tl.load(
        queries + query_at[:, None] + (element * query_element)[None, :], there[:, None] & filled[None, :], other=0.0
    )
    key_start = keys + batch * key_batch + (head // group) * key_head + (element * key_element)[None, :]
    last_start = last_keys + batch * last_batch + (head // group) * last_head + (element * last_element)[None, :]
    row = (batch * heads + head) * clusters + cluster
    new_peak = tl.load(new_peaks + row, there, other=0.0)
    old_peak = tl.load(old_peaks + row, there, other=0.0)
    new_log = tl.log(tl.load(new_masses + row, there, other=1.0))
    old_log = tl.log(tl.load(old_masses + row, there, other=1.0))
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    stop = tl.minimum(part * span + span, length)
    for first in range(part * span, stop, BLOCK_KEYS):
        column = first + tl.arange(0, BLOCK_KEYS)
        seen = column < stop
        keyed = seen[:, None] & filled[None, :]
        place = column.to(tl.int64)[:, None]
        new_key = tl.load(key_start + place * key_column, keyed, other=0.0)
        old_key = tl.load(last_start + place * last_column, keyed, other=0.0)
        new = attention_scores(query, new_key, scale, soft_cap, CAPPED, UPCAST)
        old = attention_scores(query, old_key, scale, soft_cap, CAPPED, UPCAST)
        if MASKED:
            seen &= tl.load(key_mask + batch * mask_batch + column * mask_column, seen, other=0) != 0
        terms = kl_terms(new - new_peak[:, None] - new_log[:, None], old - old_peak[:, None] - old_log[:, None])
        total += tl.sum(tl.where(seen[None, :], terms, 0.0), 1)
    tl.store(drift + row * tl.num_programs(1) + part, total, there)


def full_drift(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    last_keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Float32[Tensor, "batch clusters"]:
    """As in full_drift_ref.py."""
    check_attention(queries, last_keys)
    new, old, of_sinks = with_sinks(
        proxy_attention(queries, keys, key_mask, soft_cap),
        proxy_attention(queries, last_keys, key_mask, soft_cap),
        None if sink_keys is None else sink_scores(queries, sink_keys, soft_cap),
    )
    batch, heads, clusters, head_dim = queries.shape
    length = keys.shape[2]
    block = 32 if narrow(queries, keys) else 16
    tiles = max(1, -(-clusters // block))
    parts = max(1, min(-(-PROGRAMS // max(1, tiles * batch * heads)), length // LEAST_KEYS))
    span = -(-length // (parts * block)) * block
    drift = torch.empty(batch, heads, clusters, parts, dtype=torch.float32, device=keys.device)
    if drift.numel() == 0 or length == 0:
        return (drift.zero_().sum(-1) + of_sinks).mean(1)
    # Without a mask the kernel reads none; any pointer does.
    mask = queries if key_mask is None else key_mask.view(torch.uint8)
    launch(
        _full_drift,
        (tiles, parts, batch * heads),
        queries,
        keys,
        last_keys,
        mask,
        new.peak.contiguous(),
        new.mass.contiguous(),
        old.peak.contiguous(),
        old.mass.contiguous(),
        drift,
        *queries.stride(),
        *keys.stride(),
        *last_keys.stride(),
        *mask.stride()[:2],
        heads,
        heads // keys.shape[1],
        clusters,
        length,
        head_dim,
        span,
        head_dim**-0.5,
        soft_cap or 0.0,
        MASKED=key_mask is not None,
        CAPPED=soft_cap is not None,
        UPCAST=upcast(queries, keys) or upcast(queries, last_keys),
        BLOCK_ROWS=block,
        BLOCK_KEYS=block,
        BLOCK_ELEMENTS=elements_block(head_dim),
        on=keys,
    )
    return (drift.sum(-1) + of_sinks).mean(1)


_STRIDES = "query_batch query_head query_cluster key_batch key_head key_column last_batch last_head last_column"
_SIZES = "mask_batch mask_column heads group clusters length head_dim span"
_CONSTEXPRS = "query_element key_element last_element MASKED CAPPED UPCAST BLOCK_ROWS BLOCK_KEYS BLOCK_ELEMENTS"
COMPILATIONS = tuple(
    Compilation(
        kernel=_full_drift,
        signature={
            **dict.fromkeys(["queries", "keys", "last_keys"], f"*{dtype}"),
            "key_mask": "*u8",
            **dict.fromkeys(["new_peaks", "new_masses", "old_peaks", "old_masses", "drift"], "*fp32"),
            **dict.fromkeys([*_STRIDES.split(), *_SIZES.split()], "i32"),
            "scale": "fp32",
            "soft_cap": "fp32",
            **dict.fromkeys(_CONSTEXPRS.split(), "constexpr"),
        },
        constexprs={
            "query_element": 1,
            "key_element": 1,
            "last_element": 1,
            "MASKED": masked,
            "CAPPED": capped,
            "UPCAST": False,
            "BLOCK_ROWS": block,
            "BLOCK_KEYS": block,
            "BLOCK_ELEMENTS": 128,
        },
        spills=dtype == "fp32",
    )
    for dtype, block, masked, capped in [
        ("bf16", 32, True, False),
        ("bf16", 32, False, True),
        ("fp32", 16, True, True),
        ("fp32", 16, True, False),
    ]
)
