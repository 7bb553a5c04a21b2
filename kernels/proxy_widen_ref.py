"""Columns of the rest that begin to change: their scores, and sums without them: the oracle, in plain torch."""

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.drift_distribution import DriftDistribution
from tiered.kernels.log_sum_exp import LogSumExp, members


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
    """Scores, columns, sums and sizes of `reference` with `columns` among the changing ones, behind those that are.

    A part that all its columns leave is dropped, and the sum over the others is as exact as one made anew, however much
    of the attention it held. A part that loses some of its columns only has them subtracted (`LogSumExp.minus`).

    Args:
        queries: as they were when `reference` was made.
        keys: rotated; those at `columns` as they were when `reference` was made.
        index: columns of `keys` that are at `columns`, anything in range at filler; None: all, in their order.
        reference: the distribution at the last update.
        columns: in the rest so far, and distinct, where valid; anything in range where not. Those that nothing may
            attend to count as filler.
        valid: False at filler.
        updating: False at sequences all of whose `columns` are filler.

    Raises:
        ValueError: shapes that do not go together.
    """
    reference.check(queries, keys, index, columns.shape[1])
    part = reference.part_of.gather(1, columns)
    if valid is not None:
        part = part.where(valid if updating is None else valid & updating[:, None], -1)
    elif updating is not None:
        part = part.where(updating[:, None], -1)
    counts = part >= 0
    columns = columns.where(counts, reference.part_of.shape[1] - 1)
    scores = reference.scores_of(queries, keys, index, counts)
    wide = torch.cat([reference.scores, scores], dim=3)
    member = members(part, reference.sizes.shape[1])
    sizes = reference.sizes - member.sum(1)
    sums = reference.sums.minus(LogSumExp.by_part(scores, part, member), (sizes == 0)[:, None, None])
    return wide, torch.cat([reference.columns, columns], dim=1), sums, sizes
