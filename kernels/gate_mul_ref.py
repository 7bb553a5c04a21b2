"""An activation of one branch times another: the gate of an MLP (arXiv 2002.05202). The oracle, in plain torch."""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Activation = Literal["silu", "gelu"]  # x · σ(x), and the tanh approximation of GELU (arXiv 1606.08415)


def gate_mul(
    gate: Float[Tensor, "*rows width"], up: Float[Tensor, "*rows width"], activation: Activation = "silu"
) -> Float[Tensor, "*rows width"]:
    """The activation of `gate`, in float32 and rounded to the dtype, times `up`, rounded again. Raises as
    `check_gate`."""
    check_gate(gate, up)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)  # in place: this is the largest tensor of a layer


def check_gate(gate: Float[Tensor, "*rows width"], up: Float[Tensor, "*rows width"]) -> None:
    """Raise `ValueError` unless `gate` and `up` have the same shape and dtype."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"up {tuple(up.shape)} of {up.dtype} does not fit gate {tuple(gate.shape)} of {gate.dtype}: shape and "
            "dtype must be equal"
        )
