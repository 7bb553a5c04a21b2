"""Root-mean-square norm (arXiv 1910.07467), most often with a weight: the oracle, in plain torch."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Hidden = Float[Tensor, "batch rows width"]


def rms_norm(
    hidden: Hidden,
    weight: Float[Tensor, " width"] | None,
    eps: float,
    *,
    offset: float | None = None,
    branch: Hidden | None = None,
) -> Hidden:
    """x / √(mean(x²) + eps) of each row x in float32, rounded to the dtype of `hidden`, times `weight`, rounded again.

    Args:
        weight: None for the norm alone, rounded once.
        offset: the scale is `offset` + `weight`, in float32 too, so the result is rounded once. None for two roundings.
        branch: added to `hidden` in place before the norm, and rounded; None for no branch.

    Raises:
        ValueError: `weight` has another width or dtype, or `branch` another shape or dtype.
    """
    check_norm(hidden, weight, branch)
    if branch is not None:
        hidden.add_(branch)
    if weight is not None and offset is not None:
        return ((offset + weight.float()) * F.rms_norm(hidden.float(), weight.shape, eps=eps)).to(hidden.dtype)
    normed = F.rms_norm(hidden.float(), hidden.shape[-1:], eps=eps).to(hidden.dtype)
    return normed if weight is None else normed * weight


def check_norm(hidden: Hidden, weight: Float[Tensor, " width"] | None, branch: Hidden | None) -> None:
    """Raise `ValueError` unless `weight` has the width and dtype of `hidden`, and `branch` its shape and dtype, or they
    are None."""
    if weight is not None and (weight.shape != hidden.shape[-1:] or weight.dtype != hidden.dtype):
        raise ValueError(
            f"weight {tuple(weight.shape)} of {weight.dtype} does not fit hidden {tuple(hidden.shape)} of "
            f"{hidden.dtype}: width and dtype must be equal"
        )
    if branch is not None and (branch.shape != hidden.shape or branch.dtype != hidden.dtype):
        raise ValueError(
            f"branch {tuple(branch.shape)} of {branch.dtype} does not fit hidden {tuple(hidden.shape)} of "
            f"{hidden.dtype}: shape and dtype must be equal"
        )
