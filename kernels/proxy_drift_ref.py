"""How far the attention of centroids has moved, from the changed keys alone: the oracle, in plain torch."""

from jaxtyping import Float, Float32
from torch import Tensor

from tiered.kernels.divergence import divergence_terms
from tiered.kernels.drift_distribution import DriftDistribution


def proxy_drift(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads changing head_dim"],
    reference: DriftDistribution,
) -> Float32[Tensor, "batch clusters"]:
    """KL(current ‖ at the last update) of the proxy attention, mean over heads; 0 where nothing may be attended to.

    Exact, for O(clusters · changing) work however long the context is: columns outside `reference` have the same score
    in both distributions, so all share one ratio of probabilities and count as a single column, whose score is their
    log-sum-exp. Nothing is subtracted from a sum, so nothing cancels, wherever the attention goes.

    Args:
        queries: as they were when `reference` was made.
        keys: as they are now, at the columns of `reference` and in their order.
        reference: the distribution at the last update.

    Raises:
        ValueError: shapes that do not go together.
    """
    log_old = reference.log_probabilities(reference.scores)
    log_new = reference.log_probabilities(reference.current_scores(queries, keys))
    return divergence_terms(log_new, log_old).sum(-1).mean(1)
