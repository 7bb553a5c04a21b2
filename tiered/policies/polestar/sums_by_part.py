"""Log-sum-exps over columns that lie in parts, a sum for each part, deterministic on every device."""

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.kernels.log_sum_exp import LogSumExp, finite
from tiered.kernels.proxy_attention_ref import SCORES_AT_ONCE
from tiered.kernels.proxy_scores import check_attention, proxy_scores


def sums_by_part(
    scores: Float32[Tensor, "batch heads clusters columns"], part: Int[Tensor, "batch columns"], parts: int
) -> LogSumExp:
    """Of each part's scores, with the parts along the last dimension.

    Args:
        scores: −inf is no column.
        part: of each column, below `parts`; −1 is no column, whatever its scores.
        parts: how many there are.
    """
    scores = scores.masked_fill((part < 0)[:, None, None], -torch.inf)
    index = part.clamp_min(0)[:, None, None].expand_as(scores)
    peak = scores.new_full((*scores.shape[:3], parts), -torch.inf).scatter_reduce_(3, index, scores, "amax")
    weights = scores.sub_(finite(peak).gather(3, index)).exp_()
    # A product with ones and zeros: a scattered sum would add in another order each time on CUDA.
    member = part[..., None] == torch.arange(parts, device=part.device)
    return LogSumExp(peak, (weights.flatten(1, 2) @ member.float()).view_as(peak))


def attention_by_part(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    part: Int[Tensor, "batch length"],
    parts: int,
    soft_cap: float | None = None,
) -> LogSumExp:
    """`sums_by_part` of the scores of `queries` over all `keys`, which exist for a chunk of keys at a time.

    It takes rows · length · (head_dim + parts) multiplications; a row is a query of a head.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_attention(queries, keys)
    queries = queries.float()
    rows = queries[..., 0]
    total = LogSumExp.empty(rows[..., None].expand(*rows.shape, parts))
    # Each chunk goes over all sums: it holds as many scores at least.
    chunk = max(16, parts, SCORES_AT_ONCE // max(1, rows.numel()))
    for first in range(0, keys.shape[2], chunk):
        columns = slice(first, first + chunk)
        scores = proxy_scores(queries, keys[:, :, columns], soft_cap)
        total = total.union(sums_by_part(scores, part[:, columns], parts))
    return total


def sizes_of_parts(part: Int[Tensor, "batch columns"], parts: int) -> Int[Tensor, "batch parts"]:
    """Columns of each part; −1 is no column."""
    return part.new_zeros(part.shape[0], parts).scatter_add_(1, part.clamp_min(0), (part >= 0).to(part.dtype))
