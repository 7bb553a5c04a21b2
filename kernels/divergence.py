"""Kullback–Leibler divergence, term by term, in a form without negative terms."""

import torch
from jaxtyping import Float32
from torch import Tensor


def divergence_terms(
    log_new: Float32[Tensor, "*shape"], log_old: Float32[Tensor, "*shape"]
) -> Float32[Tensor, "*shape"]:
    """The terms of KL(new ‖ old) by column, from log-probabilities; 0 at columns that `log_old` has at −inf.

    With r = log(new / old), KL = Σ new · (r − 1 + e⁻ʳ). Both distributions sum to 1, so the terms new · (e⁻ʳ − 1) sum
    to 0. But no term is negative in this form, and an error δ in r costs r·δ instead of δ: small drifts keep their
    order.
    """
    new, ratio = log_new.exp(), log_new - log_old
    small = torch.expm1(-ratio).add_(ratio).mul_(new)
    # new · e⁻ʳ is computed as old, because e⁻ʳ overflows for r far below 0.
    large = (new * ratio).add_(log_old.exp()).sub_(new)
    return torch.where(ratio < -1, large, small).clamp_min_(0).where(log_old > -torch.inf, 0.0)
