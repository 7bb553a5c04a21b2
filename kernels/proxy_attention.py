"""Proxy attention in Triton: the sums over keys split between programs, the parts merged in torch."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.kernels.launch import Compilation, launch
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_scores import check_attention

PROGRAMS = 264  # two a multiprocessor of an H100
LEAST_KEYS = 512  # of one program: fewer do not pay for its start


@triton.jit
def add_scores(peak, mass, scores):
    """(peak, mass) of `LogSumExp` with a tile of scores added; −inf is no column."""
    grown = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(grown == -float("inf"), 0.0, grown)
    return grown, mass * tl.exp(peak - base) + tl.sum(tl.exp(scores - base[:, None]), 1)


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


@triton.jit
def _partial_sums(
    queries,
    keys,
    key_mask,
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
    kv_heads,
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
    # A row is a centroid of one of the heads that share this key head: a tile of keys is read once for all of them.
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
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
    peak = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_ROWS], tl.float32)
    stop = tl.minimum(part * span + span, length)
    key_start = keys + batch * key_batch + kv_head * key_head
    for first in range(part * span, stop, BLOCK_KEYS):
        column = first + tl.arange(0, BLOCK_KEYS)
        seen = column < stop
        key_at = column.to(tl.int64) * key_column
        key = tl.load(
            key_start + key_at[:, None] + (element * key_element)[None, :], seen[:, None] & filled[None, :], other=0.0
        )
        if MASKED:
            seen &= tl.load(key_mask + batch * mask_batch + column * mask_column, seen, other=0) != 0
        scores = attention_scores(query, key, scale, soft_cap, CAPPED, UPCAST)
        peak, mass = add_scores(peak, mass, tl.where(seen[None, :], scores, -float("inf")))
    place = ((batch * kv_heads + kv_head) * group * clusters + row) * tl.num_programs(1) + part
    tl.store(peaks + place, peak, there)
    tl.store(masses + place, mass, there)


def proxy_attention(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
) -> LogSumExp:
    """As in proxy_attention_ref.py."""
    check_attention(queries, keys)
    batch, heads, clusters, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    if queries[..., 0].numel() == 0:
        return LogSumExp.empty(queries[..., 0].float())
    block = 64 if narrow(queries, keys) else 32
    tiles = -(-group * clusters // block)
    parts = max(1, min(-(-PROGRAMS // (tiles * batch * kv_heads)), length // LEAST_KEYS))
    span = -(-length // (parts * block)) * block
    sums = torch.empty(2, batch, heads, clusters, parts, dtype=torch.float32, device=keys.device)
    # Without a mask the kernel reads none; any pointer does.
    mask = queries if key_mask is None else key_mask.view(torch.uint8)
    launch(
        _partial_sums,
        (tiles, parts, batch * kv_heads),
        queries,
        keys,
        mask,
        *sums,
        *queries.stride(),
        *keys.stride(),
        *mask.stride()[:2],
        kv_heads,
        group,
        clusters,
        length,
        head_dim,
        span,
        head_dim**-0.5,
        soft_cap or 0.0,
        MASKED=key_mask is not None,
        CAPPED=soft_cap is not None,
        UPCAST=upcast(queries, keys),
        BLOCK_ROWS=block,
        BLOCK_KEYS=block,
        BLOCK_ELEMENTS=elements_block(head_dim),
        on=keys,
    )
    return LogSumExp(*sums).merged()


def narrow(queries: Tensor, keys: Tensor) -> bool:
    """Whether both hold two bytes an element: in float32, tiles of half the size fill the same memory."""
    return queries.element_size() == keys.element_size() == 2


def elements_block(head_dim: int) -> int:
    """Elements of a tile that holds whole heads; 16 is the least that a matrix product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def upcast(queries: Tensor, keys: Tensor) -> bool:
    """Whether products need float32 operands: where dtypes differ, and in the interpreter, whose bfloat16 is wrong."""
    return queries.dtype != keys.dtype or not keys.is_cuda


_STRIDES = "query_batch query_head query_cluster key_batch key_head key_column"
_SIZES = "mask_batch mask_column kv_heads group clusters length head_dim span"
COMPILATIONS = tuple(
    Compilation(
        kernel=_partial_sums,
        types={
            "queries keys": f"*{dtype}",
            "key_mask": "*u8",
            "peaks masses": "*fp32",
            f"{_STRIDES} {_SIZES}": "i32",
            "scale soft_cap": "fp32",
        },
        constexprs={
            "query_element": 1,
            "key_element": 1,
            "MASKED": masked,
            "CAPPED": capped,
            "UPCAST": False,
            "BLOCK_ROWS": block,
            "BLOCK_KEYS": block,
            "BLOCK_ELEMENTS": 128,
        },
    )
    for dtype, block, masked, capped in [
        ("bf16", 64, True, False),
        ("bf16", 64, False, True),
        ("fp32", 32, True, True),
        ("fp32", 32, True, False),
    ]
)
