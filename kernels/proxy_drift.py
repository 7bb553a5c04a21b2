"""Drift from the changed keys in Triton: a program takes the centroids of one head, the mean over heads is torch's."""

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
    add_scores,
    attention_scores,
    elements_block,
    narrow,
    parts_block,
    upcast,
)


@triton.jit
def kl_terms(log_new, log_old):
    """`divergence_terms`: below |r| = 1/2 the series of r − 1 + e⁻ʳ, for Triton has no expm1."""
    new = tl.exp(log_new)
    r = log_new - log_old
    series = 1 / 2 + r * (-1 / 6 + r * (1 / 24 + r * (-1 / 120 + r * (1 / 720 + r * (-1 / 5040 + r / 40320)))))
    return tl.where(tl.abs(r) < 0.5, new * r * r * series, tl.maximum(new * r + (tl.exp(log_old) - new), 0.0))


@triton.jit
def _current_scores(
    query,
    key_start,
    key_column,
    index,
    place,
    counts,
    filled,
    scale,
    soft_cap,
    INDEXED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Scores of now of the changing columns numbered by `place`; −inf where they do not count."""
    key_at = place.to(tl.int64)
    if INDEXED:
        key_at = tl.load(index + place, counts, other=0).to(tl.int64)
    key = tl.load(key_start + (key_at * key_column)[:, None], counts[:, None] & filled[None, :], other=0.0)
    new = attention_scores(query, key, scale, soft_cap, CAPPED, UPCAST)
    return tl.where(counts[None, :], new, -float("inf"))


# What varies from layer to layer compiles nothing: Triton would tell 1 and multiples of 16 from other counts.
@triton.jit(do_not_specialize=["clusters", "changing", "keep_first", "keep_stop", "parts", "length"])
def _drift(
    queries,
    keys,
    index,
    updating,
    part_of,
    old_scores,
    old_columns,
    old_peaks,
    old_masses,
    old_sizes,
    drift,
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
    updating_batch,
    group,
    clusters,
    changing,
    keep_first,
    keep_stop,
    parts,
    length,
    head_dim,
    scale,
    soft_cap,
    INDEXED: tl.constexpr,
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
    key_start = keys + batch * key_batch + (head // group) * key_head + element[None, :] * key_element
    row = (batch * tl.num_programs(1) + head) * clusters + cluster
    index += batch * changing
    updates = True
    if UPDATING:
        updates = tl.load(updating + batch * updating_batch) != 0

    number = tl.arange(0, BLOCK_PARTS)
    filled_part = number < parts
    sum_at = (row * parts)[:, None] + number[None, :]
    summed = there[:, None] & filled_part[None, :]
    peaks = tl.load(old_peaks + sum_at, summed, other=-float("inf"))
    masses = tl.load(old_masses + sum_at, summed, other=0.0)
    rest = tl.max(peaks, 1)
    share = tl.sum(masses * tl.exp(peaks - tl.where(rest == -float("inf"), 0.0, rest)[:, None]), 1)

    old_start = old_scores + row * changing
    kept = keep_stop - keep_first
    old_peak, old_mass, new_peak, new_mass = rest, share, rest, share
    for first in range(0, changing, BLOCK_KEYS):
        place = first + tl.arange(0, BLOCK_KEYS)
        given = place < changing
        column = tl.load(old_columns + batch * changing + place, given, other=length)
        counts = column < length
        old = tl.load(old_start[:, None] + place[None, :], there[:, None] & given[None, :], other=-float("inf"))
        new = _current_scores(
            query, key_start, key_column, index, place, counts, filled, scale, soft_cap, INDEXED, CAPPED, UPCAST
        )
        old_peak, old_mass = add_scores(old_peak, old_mass, old)
        new_peak, new_mass = add_scores(new_peak, new_mass, new)
        stays = (place >= keep_first) & (place < keep_stop)
        target = new_scores + (row * kept - keep_first)[:, None] + place[None, :]
        tl.store(target, tl.where(updates, new, old), there[:, None] & stays[None, :])
        tl.store(new_columns + batch * kept + place - keep_first, column, stays & first_of_batch)

    # Where there is nothing to attend to, every term below is dropped; 0 and 1 keep the arithmetic finite.
    old_peak = tl.where(old_mass > 0, old_peak, 0.0)
    new_peak = tl.where(new_mass > 0, new_peak, 0.0)
    old_log = tl.log(tl.where(old_mass > 0, old_mass, 1.0))
    new_log = tl.log(tl.where(new_mass > 0, new_mass, 1.0))

    own = tl.log(tl.where(share > 0, share, 1.0))
    held = tl.where(share > 0, rest, 0.0)
    rest_terms = kl_terms((held - new_peak) - new_log + own, (held - old_peak) - old_log + own)
    total = tl.where(share > 0, rest_terms, 0.0)
    # The scores are computed again, here and below: those of every tile would take more registers than there are.
    for first in range(0, changing, BLOCK_KEYS):
        place = first + tl.arange(0, BLOCK_KEYS)
        given = place < changing
        column = tl.load(old_columns + batch * changing + place, given, other=length)
        counts = column < length
        old = tl.load(old_start[:, None] + place[None, :], there[:, None] & given[None, :], other=-float("inf"))
        new = _current_scores(
            query, key_start, key_column, index, place, counts, filled, scale, soft_cap, INDEXED, CAPPED, UPCAST
        )
        terms = kl_terms(new - new_peak[:, None] - new_log[:, None], old - old_peak[:, None] - old_log[:, None])
        total += tl.sum(tl.where(old > -float("inf"), terms, 0.0), 1)
    tl.store(drift + row, total, there)

    peaks = tl.load(old_peaks + sum_at, summed, other=-float("inf"))
    masses = tl.load(old_masses + sum_at, summed, other=0.0)
    sizes = tl.load(old_sizes + batch * parts + number, filled_part, other=0)
    for first in range(0, changing, BLOCK_KEYS):
        place = first + tl.arange(0, BLOCK_KEYS)
        back = (place < changing) & ((place < keep_first) | (place >= keep_stop))
        column = tl.load(old_columns + batch * changing + place, back, other=length)
        part = tl.load(part_of + batch * (length + 1) + column).to(tl.int32)
        counts = part >= 0
        new = _current_scores(
            query, key_start, key_column, index, place, counts, filled, scale, soft_cap, INDEXED, CAPPED, UPCAST
        )
        peaks, masses = add_by_part(peaks, masses, new, part, parts, BLOCK_PARTS)
        sizes += tl.sum((part[:, None] == number[None, :]).to(tl.int64), 0)
    tl.store(new_peaks + sum_at, peaks, summed)
    tl.store(new_masses + sum_at, masses, summed)
    tl.store(new_sizes + batch * parts + number, sizes, filled_part & first_of_batch)


def proxy_drift(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads _ head_dim"],
    index: Int[Tensor, "batch changing"] | None,
    reference: DriftDistribution,
    keep: tuple[int, int],
    updating: Bool[Tensor, " batch"] | None = None,
) -> tuple[
    Float32[Tensor, "batch clusters"],
    Float32[Tensor, "batch heads clusters kept"],
    Int[Tensor, "batch kept"],
    LogSumExp,
    Int[Tensor, "batch parts"],
]:
    """As in proxy_drift_ref.py."""
    reference.check(queries, keys, index, reference.columns.shape[1])
    batch, heads, clusters, head_dim = queries.shape
    first, stop = keep
    drift = torch.empty(batch, heads, clusters, dtype=torch.float32, device=keys.device)
    scores = reference.scores.new_empty(batch, heads, clusters, stop - first)
    columns = reference.columns.new_empty(batch, stop - first)
    sums = torch.empty(2, *reference.sums.peak.shape, dtype=torch.float32, device=keys.device)
    sizes = torch.empty_like(reference.sizes)
    parts = sizes.shape[1]
    block = 32 if narrow(queries, keys) else 16
    # Where keys stand in the order of columns, or every sequence updates, the kernel reads nothing that says so; any
    # pointer does.
    which = columns if updating is None else updating.view(torch.uint8)
    launch(
        _drift,
        (max(1, -(-clusters // block)), heads, batch),
        queries,
        keys,
        which if index is None else index.contiguous(),
        which,
        reference.part_of,
        reference.scores.contiguous(),
        reference.columns.contiguous(),
        reference.sums.peak.contiguous(),
        reference.sums.mass.contiguous(),
        reference.sizes,
        drift,
        scores,
        columns,
        *sums,
        sizes,
        *queries.stride(),
        *keys.stride(),
        which.stride(0),
        heads // keys.shape[1],
        clusters,
        reference.scores.shape[3],
        first,
        stop,
        parts,
        reference.part_of.shape[1] - 1,
        head_dim,
        head_dim**-0.5,
        reference.soft_cap or 0.0,
        INDEXED=index is not None,
        UPDATING=updating is not None,
        CAPPED=reference.soft_cap is not None,
        UPCAST=upcast(queries, keys),
        BLOCK_ROWS=block,
        BLOCK_KEYS=block,
        BLOCK_PARTS=parts_block(parts),
        BLOCK_ELEMENTS=elements_block(head_dim),
        num_warps=WARPS,
        on=keys,
    )
    return drift.mean(1), scores, columns, LogSumExp(*sums), sizes
