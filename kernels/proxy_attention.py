"""Proxy attention in Triton: the sums over keys split between programs, and the splits merged by a second kernel."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.kernels.launch import launch
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_scores import check_attention

PROGRAMS = 264  # two a multiprocessor of an H100
MERGED, SPLITS = 64, 16  # of a tile of the second kernel: sums, and splits of each
LEAST_KEYS = 512  # of one program: fewer do not pay for its start
WARPS = 8  # of a program: the sums of parts, and of float32, take the registers of so many


@triton.jit
def add_scores(peak, mass, scores):
    """(peak, mass) of `LogSumExp` with a tile of scores added; −inf is no column."""
    grown = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(grown == -float("inf"), 0.0, grown)
    return grown, mass * tl.exp(peak - base) + tl.sum(tl.exp(scores - base[:, None]), 1)


@triton.jit
def add_by_part(peaks, masses, scores, part, parts, BLOCK_PARTS: tl.constexpr):
    """`LogSumExp.by_part` of a tile of scores, added to the (peaks, masses) of each row and part; −1 is no column."""
    number = tl.arange(0, BLOCK_PARTS)
    grown = peaks
    base = tl.zeros_like(scores)
    for p in range(parts):
        own = part == p
        largest = tl.max(tl.where(own[None, :], scores, -float("inf")), 1)
        grown = tl.where((number == p)[None, :], tl.maximum(grown, largest[:, None]), grown)
        peak = tl.max(tl.where((number == p)[None, :], grown, -float("inf")), 1)
        base = tl.where(own[None, :], tl.where(peak == -float("inf"), 0.0, peak)[:, None], base)
    weights = tl.where((part >= 0)[None, :], tl.exp(scores - base), 0.0)
    kept = masses * tl.exp(peaks - tl.where(grown == -float("inf"), 0.0, grown))
    if BLOCK_PARTS == 1:
        return grown, kept + tl.sum(weights, 1)[:, None]
    member = (part[:, None] == number[None, :]).to(tl.float32)
    return grown, kept + tl.dot(weights, member, input_precision="ieee")


@triton.jit
def soft_capped(scores, soft_cap):
    """c · tanh(scores / c): Triton itself has no tanh. Next to 0 the series, for 1 − e⁻²ˣ would cancel there."""
    x = scores / soft_cap
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    fallen = tl.exp(-2 * tl.abs(x))
    ratio = (1 - fallen) / (1 + fallen)
    return soft_cap * tl.where(square < 1 / 16, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def attention_scores(queries, keys, scale, soft_cap, CAPPED: tl.constexpr, UPCAST: tl.constexpr):
    """Scores of a tile of rows over a tile of keys, in float32."""
    if UPCAST:
        queries = queries.to(tl.float32)
        keys = keys.to(tl.float32)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if CAPPED:
        scores = soft_capped(scores, soft_cap)
    return scores


# What varies from layer to layer compiles nothing: Triton would tell 1 and multiples of 16 from other counts.
@triton.jit(do_not_specialize=["clusters", "length", "span", "parts", "splits", "mask_batch", "part_batch"])
def _partial_sums(
    queries,
    keys,
    key_mask,
    part,
    peaks,
    masses,
    query_batch,
    query_head,
    query_cluster,
    query_element,
    key_batch,
    key_head,
    key_column,
    key_element,
    mask_batch,
    mask_column,
    part_batch,
    part_column,
    kv_heads,
    group,
    clusters,
    length,
    head_dim,
    span,
    parts,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    PARTED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    # A row is a centroid of one of the heads that share this key head: a tile of keys is read once for all of them.
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)
    head = kv_head * group + row // clusters
    cluster = row % clusters
    there = row < group * clusters
    element = tl.arange(0, BLOCK_ELEMENTS)
    filled = element < head_dim
    query_at = batch * query_batch + head * query_head + cluster * query_cluster
    query = tl.load(
        queries + query_at[:, None] + (element * query_element)[None, :], there[:, None] & filled[None, :], other=0.0
    )
    peak = tl.full([BLOCK_ROWS, BLOCK_PARTS], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_ROWS, BLOCK_PARTS], tl.float32)
    stop = tl.minimum(split * span + span, length)
    key_start = keys + batch * key_batch + kv_head * key_head
    for first in range(split * span, stop, BLOCK_KEYS):
        column = first + tl.arange(0, BLOCK_KEYS)
        seen = column < stop
        key_at = column.to(tl.int64) * key_column
        key = tl.load(
            key_start + key_at[:, None] + (element * key_element)[None, :], seen[:, None] & filled[None, :], other=0.0
        )
        if MASKED:
            seen &= tl.load(key_mask + batch * mask_batch + column * mask_column, seen, other=0) != 0
        own = tl.where(seen, 0, -1)
        if PARTED:
            own = tl.load(part + batch * part_batch + column * part_column, seen, other=-1).to(tl.int32)
        scores = attention_scores(query, key, scale, soft_cap, CAPPED, UPCAST)
        scores = tl.where((own >= 0)[None, :], scores, -float("inf"))
        peak, mass = add_by_part(peak, mass, scores, own, parts, BLOCK_PARTS)
    number = tl.arange(0, BLOCK_PARTS)
    place = ((batch * kv_heads + kv_head) * group * clusters + row) * tl.num_programs(1) + split
    written = there[:, None] & (number < parts)[None, :]
    tl.store(peaks + place[:, None] * parts + number[None, :], peak, written)
    tl.store(masses + place[:, None] * parts + number[None, :], mass, written)


@triton.jit(do_not_specialize=["sums", "splits", "parts"])
def _merge(peaks, masses, peak, mass, sums, splits, parts, BLOCK: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = place // parts * splits * parts + place % parts
    whole = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        at = start[:, None] + split[None, :] * parts
        there = (place < sums)[:, None] & (split < splits)[None, :]
        of_splits = tl.load(peaks + at, there, other=-float("inf"))
        grown = tl.maximum(whole, tl.max(of_splits, 1))
        base = tl.where(grown == -float("inf"), 0.0, grown)
        weights = tl.load(masses + at, there, other=0.0) * tl.exp(of_splits - base[:, None])
        whole, total = grown, total * tl.exp(whole - base) + tl.sum(weights, 1)
    tl.store(peak + place, whole, place < sums)
    tl.store(mass + place, total, place < sums)


def proxy_attention(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
    part: Int[Tensor, "batch length"] | None = None,
    parts: int = 1,
) -> LogSumExp:
    """As in proxy_attention_ref.py."""
    check_attention(queries, keys)
    batch, heads, clusters, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    shape = (batch, heads, clusters) if part is None else (batch, heads, clusters, parts)
    whole = torch.empty(2, *shape, dtype=torch.float32, device=keys.device)
    if whole.numel() == 0:
        return LogSumExp(*whole)
    block = attention_block(narrow(queries, keys), parts)
    tiles = -(-group * clusters // block)
    splits = max(1, min(-(-PROGRAMS // (tiles * batch * kv_heads)), length // LEAST_KEYS))
    span = -(-length // (splits * block)) * block
    sums = whole if splits == 1 else whole.new_empty(2, batch, heads, clusters, splits, parts)
    # Without a mask, or parts, the kernel reads none; any pointer does.
    mask = queries if key_mask is None else key_mask.view(torch.uint8)
    numbers = queries if part is None else part
    launch(
        _partial_sums,
        (tiles, splits, batch * kv_heads),
        queries,
        keys,
        mask,
        numbers,
        *sums,
        *queries.stride(),
        *keys.stride(),
        *mask.stride()[:2],
        *numbers.stride()[:2],
        kv_heads,
        group,
        clusters,
        length,
        head_dim,
        span,
        parts,
        head_dim**-0.5,
        soft_cap or 0.0,
        MASKED=key_mask is not None,
        PARTED=part is not None,
        CAPPED=soft_cap is not None,
        UPCAST=upcast(queries, keys),
        BLOCK_ROWS=block,
        BLOCK_KEYS=block,
        BLOCK_PARTS=parts_block(parts),
        BLOCK_ELEMENTS=elements_block(head_dim),
        num_warps=WARPS,
        on=keys,
    )
    if splits > 1:
        count = whole[0].numel()
        launch(
            _merge,
            (-(-count // MERGED),),
            *sums,
            *whole,
            count,
            splits,
            parts,
            BLOCK=MERGED,
            BLOCK_SPLITS=SPLITS,
            on=keys,
        )
    return LogSumExp(*whole)


def attention_block(narrow: bool, parts: int) -> int:
    """Rows of a tile, and keys: sums of parts take the registers of half of them."""
    return (64 if narrow else 32) // (1 if parts == 1 else 2)


def narrow(queries: Tensor, keys: Tensor) -> bool:
    """Whether both hold two bytes an element: in float32, tiles of half the size fill the same memory."""
    return queries.element_size() == keys.element_size() == 2


def elements_block(head_dim: int) -> int:
    """Elements of a tile that holds whole heads; 16 is the least that a matrix product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def parts_block(parts: int) -> int:
    """Parts of a tile of sums: one, or as many as a matrix product takes."""
    return 1 if parts == 1 else elements_block(parts)


def upcast(queries: Tensor, keys: Tensor) -> bool:
    """Whether products need float32 operands: where dtypes differ, and in the interpreter, whose bfloat16 is wrong."""
    return queries.dtype != keys.dtype or not keys.is_cuda
