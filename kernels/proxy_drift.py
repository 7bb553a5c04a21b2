"""Drift from the changed keys in Triton: a program takes the centroids of one head, the mean over heads is torch's."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from tiered.kernels.drift_distribution import DriftDistribution
from tiered.kernels.launch import Compilation, launch
from tiered.kernels.proxy_attention import add_scores, attention_scores, elements_block, narrow, upcast


@triton.jit
def kl_terms(log_new, log_old):
    """`divergence_terms`: below |r| = 1/2 the series of r − 1 + e⁻ʳ, for Triton has no expm1."""
    new = tl.exp(log_new)
    r = log_new - log_old
    series = 1 / 2 + r * (-1 / 6 + r * (1 / 24 + r * (-1 / 120 + r * (1 / 720 + r * (-1 / 5040 + r / 40320)))))
    return tl.where(tl.abs(r) < 0.5, new * r * r * series, tl.maximum(new * r + (tl.exp(log_old) - new), 0.0))


@triton.jit
def _current_scores(
    query, key_start, key_column, column, there, scale, soft_cap, old, CAPPED: tl.constexpr, UPCAST: tl.constexpr
):
    """Scores of now at `column`; −inf where `old`, those of then, says that a column does not count."""
    key = tl.load(key_start + (column * key_column)[:, None], there, other=0.0)
    new = attention_scores(query, key, scale, soft_cap, CAPPED, UPCAST)
    return tl.where(old > -float("inf"), new, -float("inf"))


@triton.jit
def _drift(
    queries,
    keys,
    rest_peak,
    rest_mass,
    scores,
    drift,
    query_batch,
    query_head,
    query_cluster,
    query_element,
    key_batch,
    key_head,
    key_column,
    key_element,
    group,
    clusters,
    changing,
    head_dim,
    scale,
    soft_cap,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    cluster = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    there = cluster < clusters
    element = tl.arange(0, BLOCK_ELEMENTS)
    filled = element < head_dim
    query_at = batch * query_batch + head * query_head + cluster * query_cluster
    query = tl.load(
        queries + query_at[:, None] + (element * query_element)[None, :], there[:, None] & filled[None, :], other=0.0
    )
    key_start = keys + batch * key_batch + (head // group) * key_head
    row = (batch * tl.num_programs(1) + head) * clusters + cluster
    rest = tl.load(rest_peak + row, there, other=-float("inf"))
    share = tl.load(rest_mass + row, there, other=0.0)

    old_start = scores + row * changing
    key_start += element[None, :] * key_element

    old_peak, old_mass, new_peak, new_mass = rest, share, rest, share
    for first in range(0, changing, BLOCK_KEYS):
        column = first + tl.arange(0, BLOCK_KEYS)
        given = column < changing
        old = tl.load(old_start[:, None] + column[None, :], there[:, None] & given[None, :], other=-float("inf"))
        keyed = given[:, None] & filled[None, :]
        new = _current_scores(query, key_start, key_column, column, keyed, scale, soft_cap, old, CAPPED, UPCAST)
        old_peak, old_mass = add_scores(old_peak, old_mass, old)
        new_peak, new_mass = add_scores(new_peak, new_mass, new)

    # Where there is nothing to attend to, every term below is dropped; 0 and 1 keep the arithmetic finite.
    old_peak = tl.where(old_mass > 0, old_peak, 0.0)
    new_peak = tl.where(new_mass > 0, new_peak, 0.0)
    old_log = tl.log(tl.where(old_mass > 0, old_mass, 1.0))
    new_log = tl.log(tl.where(new_mass > 0, new_mass, 1.0))

    own = tl.log(tl.where(share > 0, share, 1.0))
    held = tl.where(share > 0, rest, 0.0)
    rest_terms = kl_terms((held - new_peak) - new_log + own, (held - old_peak) - old_log + own)
    total = tl.where(share > 0, rest_terms, 0.0)
    # The scores are computed again: to hold those of every tile would take more registers than there are.
    for first in range(0, changing, BLOCK_KEYS):
        column = first + tl.arange(0, BLOCK_KEYS)
        given = column < changing
        old = tl.load(old_start[:, None] + column[None, :], there[:, None] & given[None, :], other=-float("inf"))
        keyed = given[:, None] & filled[None, :]
        new = _current_scores(query, key_start, key_column, column, keyed, scale, soft_cap, old, CAPPED, UPCAST)
        terms = kl_terms(new - new_peak[:, None] - new_log[:, None], old - old_peak[:, None] - old_log[:, None])
        total += tl.sum(tl.where(old > -float("inf"), terms, 0.0), 1)
    tl.store(drift + row, total, there)


def proxy_drift(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads changing head_dim"],
    reference: DriftDistribution,
) -> Float32[Tensor, "batch clusters"]:
    """As in proxy_drift_ref.py."""
    reference.check(queries, keys)
    batch, heads, clusters, head_dim = queries.shape
    drift = torch.empty(batch, heads, clusters, dtype=torch.float32, device=keys.device)
    if drift.numel() == 0:
        return drift.mean(1)
    block = 32 if narrow(queries, keys) else 16
    launch(
        _drift,
        (-(-clusters // block), heads, batch),
        queries,
        keys,
        reference.rest.peak.contiguous(),
        reference.rest.mass.contiguous(),
        reference.scores.contiguous(),
        drift,
        *queries.stride(),
        *keys.stride(),
        heads // keys.shape[1],
        clusters,
        keys.shape[2],
        head_dim,
        head_dim**-0.5,
        reference.soft_cap or 0.0,
        CAPPED=reference.soft_cap is not None,
        UPCAST=upcast(queries, keys),
        BLOCK_ROWS=block,
        BLOCK_KEYS=block,
        BLOCK_ELEMENTS=elements_block(head_dim),
        on=keys,
    )
    return drift.mean(1)


_STRIDES = "query_batch query_head query_cluster key_batch key_head key_column"
COMPILATIONS = tuple(
    Compilation(
        kernel=_drift,
        types={
            "queries keys": f"*{dtype}",
            "rest_peak rest_mass scores drift": "*fp32",
            f"{_STRIDES} group clusters changing head_dim": "i32",
            "scale soft_cap": "fp32",
        },
        constexprs={
            "query_element": 1,
            "key_element": 1,
            "CAPPED": capped,
            "UPCAST": False,
            "BLOCK_ROWS": block,
            "BLOCK_KEYS": block,
            "BLOCK_ELEMENTS": 128,
        },
    )
    for dtype, block, capped in [("bf16", 32, False), ("bf16", 32, True), ("fp32", 16, False), ("fp32", 16, True)]
)
