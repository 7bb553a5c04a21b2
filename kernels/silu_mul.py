"""The gate of an MLP in Triton: both branches are read once, and only their product is written."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.launch import launch
from tiered.kernels.silu_mul_ref import check_gate

TILE = 1024  # elements of a program


@triton.jit
def gated(x, y, DTYPE: tl.constexpr):
    """x · σ(x) of float32 `x`, rounded to `DTYPE`, times `y`, rounded again."""
    return ((x / (1 + tl.exp(-x))).to(DTYPE).to(tl.float32) * y).to(DTYPE)


# `total` is specialised, because loads are wide only if it is known to be a multiple of 16.
@triton.jit
def _silu_mul(gate, up, product, total, TILE: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = element < total
    x = tl.load(gate + element, inside, other=0.0).to(tl.float32)
    y = tl.load(up + element, inside, other=0.0).to(tl.float32)
    tl.store(product + element, gated(x, y, product.dtype.element_ty), inside)


def silu_mul(gate: Float[Tensor, "*rows width"], up: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
    """As in silu_mul_ref.py."""
    check_gate(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty_like(gate)
    if product.numel():
        launch(_silu_mul, (triton.cdiv(gate.numel(), TILE),), gate, up, product, gate.numel(), TILE=TILE, on=gate)
    return product
