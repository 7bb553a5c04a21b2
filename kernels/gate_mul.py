"""The gate of an MLP in Triton: both branches are read once, and only their product is written."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.gate_mul_ref import Activation, check_gate
from tiered.kernels.launch import launch

TILE = 1024  # elements of a program


@triton.jit
def gated(x, y, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """The activation of float32 `x`, rounded to `DTYPE`, times `y`, rounded again."""
    steep = x
    if ACTIVATION == "gelu":  # x · σ(2u) is x · (1 + tanh(u)) / 2 of u = √(2/π) · (x + 0.044715 x³)
        steep = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return ((x / (1 + tl.exp(-steep))).to(DTYPE).to(tl.float32) * y).to(DTYPE)


# `total` is specialised, because loads are wide only if it is known to be a multiple of 16.
@triton.jit
def _gate_mul(gate, up, product, total, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = element < total
    x = tl.load(gate + element, inside, other=0.0).to(tl.float32)
    y = tl.load(up + element, inside, other=0.0).to(tl.float32)
    tl.store(product + element, gated(x, y, ACTIVATION, product.dtype.element_ty), inside)


def gate_mul(
    gate: Float[Tensor, "*rows width"], up: Float[Tensor, "*rows width"], activation: Activation = "silu"
) -> Float[Tensor, "*rows width"]:
    """As in gate_mul_ref.py."""
    check_gate(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty_like(gate)
    if product.numel():
        grid, options = (triton.cdiv(gate.numel(), TILE),), {"ACTIVATION": activation, "TILE": TILE}
        launch(_gate_mul, grid, gate, up, product, gate.numel(), **options, on=gate)
    return product
