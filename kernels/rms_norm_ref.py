"""Root-mean-square norm (arXiv 1910.07467) with a weight: the oracle, in plain torch."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Hidden = Float[Tensor, "batch rows width"]


def rms_norm(hidden: Hidden, weight: Float[Tensor, " width"], eps: float, *, zero_centred: bool = False) -> Hidden:
    """x / √(mean(x²) + eps) of each row x in float32, rounded to the dtype of `hidden`, times `weight`, rounded again.

    Args:
        zero_centred: the scale is 1 + `weight`, in float32 too, so the result is rounded once.

    Raises:
        ValueError: `weight` has another width or dtype.
    """
    check_norm(hidden, weight)
    if zero_centred:
        return ((1 + weight.float()) * F.rms_norm(hidden.float(), weight.shape, eps=eps)).to(hidden.dtype)
    return F.rms_norm(hidden.float(), weight.shape, eps=eps).to(hidden.dtype) * weight


def check_norm(hidden: Hidden, weight: Float[Tensor, " width"]) -> None:
    """Raise `ValueError` unless `weight` has the width and dtype of `hidden`."""
    if weight.shape != hidden.shape[-1:] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight {tuple(weight.shape)} of {weight.dtype} does not fit hidden {tuple(hidden.shape)} of "
            f"{hidden.dtype}: width and dtype must be equal"
        )
