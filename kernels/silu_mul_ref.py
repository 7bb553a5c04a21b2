"""SiLU of one branch times another: the gate of an MLP (arXiv 2002.05202). The oracle, in plain torch."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def silu_mul(gate: Float[Tensor, "*rows width"], up: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
    """gate · σ(gate), in float32 and rounded to the dtype, times `up`, rounded again. Raises as `check_gate`."""
    check_gate(gate, up)
    return F.silu(gate).mul_(up)  # in place: this is the largest tensor of a layer


def check_gate(gate: Float[Tensor, "*rows width"], up: Float[Tensor, "*rows width"]) -> None:
    """Raise `ValueError` unless `gate` and `up` have the same shape and dtype."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"up {tuple(up.shape)} of {up.dtype} does not fit gate {tuple(gate.shape)} of {gate.dtype}: shape and "
            "dtype must be equal"
        )
