"""Columns that begin to change, in Triton: a program takes the centroids of one head."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.drift_distribution import DriftDistribution
from tiered.kernels.launch import launch
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_attention import (
    WARPS,
    add_by_part,
    attention_scores,
    elements_block,
    narrow,
    parts_block,
    upcast,
)


# What varies from layer to layer compiles nothing: Triton would tell 1 and multiples of 16 from other counts.
@triton.jit(
    do_not_specialize=[
        "index_batch", "columns_batch", "valid_batch", "clusters", "changing", "extra", "parts", "length",
    ]
)  # fmt: skip
def _widen(
    queries,
    keys,
    index,
    columns,
    valid,
    updating,
    part_of,
    old_scores,
    old_columns,
    old_peaks,
    old_masses,
    old_sizes,
    new_scores,
    new_columns,
    new_peaks,
    new_masses,
    new_sizes,
    query_batch,
    query_head,
    query_cluster,
    query_element,
    key_batch,
    key_head,
    key_column,
    key_element,
    index_batch,
    index_row,
    columns_batch,
    columns_row,
    valid_batch,
    valid_row,
    updating_batch,
    group,
    clusters,
    changing,
    extra,
    parts,
    length,
    head_dim,
    scale,
    soft_cap,
    INDEXED: tl.constexpr,
    VALID: tl.constexpr,
    UPDATING: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    cluster = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    there = cluster < clusters
    # Where columns stand, and how many a part has, is the same for all centroids: one program writes it down.
    first_of_batch = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    element = tl.arange(0, BLOCK_ELEMENTS)
    filled = element < head_dim
    query_at = batch * query_batch + head * query_head + cluster * query_cluster
    query = tl.load(
        queries + query_at[:, None] + (element * query_element)[None, :], there[:, None] & filled[None, :], other=0.0
    )
    key_start = keys + batch * key_batch + (head // group) * key_head
    row = (batch * tl.num_programs(1) + head) * clusters + cluster
    wide = changing + extra

    for first in range(0, changing, BLOCK_KEYS):
        place = first + tl.arange(0, BLOCK_KEYS)
        given = place < changing
        both = there[:, None] & given[None, :]
        old = tl.load(old_scores + (row * changing)[:, None] + place[None, :], both)
        tl.store(new_scores + (row * wide)[:, None] + place[None, :], old, both)
        known = tl.load(old_columns + batch * changing + place, given)
        tl.store(new_columns + batch * wide + place, known, given & first_of_batch)

    number = tl.arange(0, BLOCK_PARTS)
    peak = tl.full([BLOCK_ROWS, BLOCK_PARTS], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_ROWS, BLOCK_PARTS], tl.float32)
    gone = tl.zeros([BLOCK_PARTS], tl.int64)
    for first in range(0, extra, BLOCK_KEYS):
        place = first + tl.arange(0, BLOCK_KEYS)
        given = place < extra
        counts = given
        if VALID:
            counts &= tl.load(valid + batch * valid_batch + place * valid_row, given, other=0) != 0
        if UPDATING:
            counts &= tl.load(updating + batch * updating_batch) != 0
        column = tl.load(columns + batch * columns_batch + place * columns_row, counts, other=0).to(tl.int64)
        part = tl.load(part_of + batch * (length + 1) + column, counts, other=-1).to(tl.int32)
        counts = part >= 0
        key_at = place.to(tl.int64)
        if INDEXED:
            key_at = tl.load(index + batch * index_batch + place * index_row, counts, other=0).to(tl.int64)
        key = tl.load(
            key_start + (key_at * key_column)[:, None] + (element * key_element)[None, :],
            counts[:, None] & filled[None, :],
            other=0.0,
        )
        scores = attention_scores(query, key, scale, soft_cap, CAPPED, UPCAST)
        scores = tl.where(counts[None, :], scores, -float("inf"))
        target = new_scores + (row * wide + changing)[:, None] + place[None, :]
        tl.store(target, scores, there[:, None] & given[None, :])
        known = tl.where(counts, column, length)
        tl.store(new_columns + batch * wide + changing + place, known, given & first_of_batch)
        peak, mass = add_by_part(peak, mass, scores, part, parts, BLOCK_PARTS)
        gone += tl.sum((part[:, None] == number[None, :]).to(tl.int64), 0)

    # `LogSumExp.minus`
    filled_part = number < parts
    left = tl.load(old_sizes + batch * parts + number, filled_part, other=0) - gone
    tl.store(new_sizes + batch * parts + number, left, filled_part & first_of_batch)
    at = (row * parts)[:, None] + number[None, :]
    both = there[:, None] & filled_part[None, :]
    old_peak = tl.load(old_peaks + at, both, other=-float("inf"))
    removed = mass * tl.exp(peak - tl.where(old_peak == -float("inf"), 0.0, old_peak))
    remains = tl.maximum(tl.load(old_masses + at, both, other=0.0) - removed, 0.0)
    remains = tl.where((left == 0)[None, :], 0.0, remains)
    tl.store(new_peaks + at, tl.where(remains > 0, old_peak, -float("inf")), both)
    tl.store(new_masses + at, remains, both)


def proxy_widen(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads _ head_dim"],
    index: Int[Tensor, "batch extra"] | None,
    reference: DriftDistribution,
    columns: Int[Tensor, "batch extra"],
    valid: Bool[Tensor, "batch extra"] | None = None,
    updating: Bool[Tensor, " batch"] | None = None,
) -> tuple[
    Float32[Tensor, "batch heads clusters wide"], Int[Tensor, "batch wide"], LogSumExp, Int[Tensor, "batch parts"]
]:
    """As in proxy_widen_ref.py."""
    reference.check(queries, keys, index, columns.shape[1])
    batch, heads, clusters, head_dim = queries.shape
    changing, extra = reference.scores.shape[3], columns.shape[1]
    scores = reference.scores.new_empty(batch, heads, clusters, changing + extra)
    places = reference.columns.new_empty(batch, changing + extra)
    sums = torch.empty(2, *reference.sums.peak.shape, dtype=torch.float32, device=keys.device)
    sizes = torch.empty_like(reference.sizes)
    parts = sizes.shape[1]
    block = 32 if narrow(queries, keys) else 16
    # Where keys stand in the order of columns, or all columns count, the kernel reads nothing that says so; any pointer
    # does.
    places_of = columns if index is None else index
    flags = columns if valid is None else valid.view(torch.uint8)
    which = columns if updating is None else updating.view(torch.uint8)
    launch(
        _widen,
        (max(1, -(-clusters // block)), heads, batch),
        queries,
        keys,
        places_of,
        columns,
        flags,
        which,
        reference.part_of,
        reference.scores.contiguous(),
        reference.columns.contiguous(),
        reference.sums.peak.contiguous(),
        reference.sums.mass.contiguous(),
        reference.sizes,
        scores,
        places,
        *sums,
        sizes,
        *queries.stride(),
        *keys.stride(),
        *places_of.stride(),
        *columns.stride(),
        *flags.stride(),
        which.stride(0),
        heads // keys.shape[1],
        clusters,
        changing,
        extra,
        parts,
        reference.part_of.shape[1] - 1,
        head_dim,
        head_dim**-0.5,
        reference.soft_cap or 0.0,
        INDEXED=index is not None,
        VALID=valid is not None,
        UPDATING=updating is not None,
        CAPPED=reference.soft_cap is not None,
        UPCAST=upcast(queries, keys),
        BLOCK_ROWS=block,
        BLOCK_KEYS=block,
        BLOCK_PARTS=parts_block(parts),
        BLOCK_ELEMENTS=elements_block(head_dim),
        num_warps=WARPS // 2 if block == 16 else WARPS,
        on=keys,
    )
    return scores, places, LogSumExp(*sums), sizes
