"""How far the attention of centroids has moved, from the changed keys alone: the oracle, in plain torch."""

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.divergence import divergence_terms
from tiered.kernels.drift_distribution import DriftDistribution
from tiered.kernels.log_sum_exp import LogSumExp, members


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
    """KL(current ‖ at the last update) of the proxy attention, mean over heads; 0 where nothing may be attended to.
    Beside it scores, columns, sums and sizes of the current distribution, where only the columns numbered by `keep`
    are changing ones and the others are back in their parts.

    Exact, for O(clusters · changing) work however long the context is: columns outside `reference` have the same score
    in both distributions, so all share one ratio of probabilities and count as a single column, whose score is their
    log-sum-exp. Nothing is subtracted from a sum, so nothing cancels, wherever the attention goes.

    Args:
        queries: as they were when `reference` was made.
        keys: rotated, as they are now.
        index: columns of `keys` that are at those of `reference`, anything in range at filler; None: all, in their
            order.
        reference: the distribution at the last update.
        keep: first of the changing columns that stay so, and the one behind the last.
        updating: False at sequences whose distribution stays that of the last update; they have no changing columns
            outside `keep` that count. None: all update.

    Raises:
        ValueError: shapes that do not go together.
    """
    reference.check(queries, keys, index, reference.columns.shape[1])
    first, stop = keep
    old = reference.scores
    counts = reference.columns < reference.part_of.shape[1] - 1
    current = reference.scores_of(queries, keys, index, counts)
    log_new, log_old = reference.log_probabilities(torch.stack([current, old]))
    drift = divergence_terms(log_new, log_old).sum(-1).mean(1)

    # Copies: the wider tensors need not live on.
    scores, columns = current[..., first:stop], reference.columns[:, first:stop].clone()
    scores = scores.clone() if updating is None else scores.where(updating[:, None, None, None], old[..., first:stop])
    if stop - first == old.shape[3]:
        return drift, scores, columns, reference.sums, reference.sizes
    back = torch.cat([current[..., :first], current[..., stop:]], dim=3)
    part = reference.part_of.gather(1, torch.cat([reference.columns[:, :first], reference.columns[:, stop:]], dim=1))
    member = members(part, reference.sizes.shape[1])
    sums = reference.sums.union(LogSumExp.by_part(back, part, member))
    return drift, scores, columns, sums, reference.sizes + member.sum(1)
