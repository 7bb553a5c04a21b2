"""The gate of an MLP in Triton: both branches are read once, and only their product is written."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.gate_mul_ref import Activation, check_gate
from tiered.kernels.launch import launch

TILE = 1024  # elements of a row in a program


@triton.jit
def gated(x, y, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """The activation of float32 `x`, rounded to `DTYPE`, times `y`, rounded again."""
    steep = x
    if ACTIVATION == "gelu":  # x · σ(2u) is x · (1 + tanh(u)) / 2 of u = √(2/π) · (x + 0.044715 x³)
        steep = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return ((x / (1 + tl.exp(-steep))).to(DTYPE).to(tl.float32) * y).to(DTYPE)


# Sizes are specialised, because loads are wide only if they are known to be multiples of 16.
@triton.jit
def _gate_mul(gate, up, product, gate_row, up_row, width, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = element < width
    x = tl.load(gate + row * gate_row + element, inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + element, inside, other=0.0).to(tl.float32)
    tl.store(product + row * width + element, gated(x, y, ACTIVATION, product.dtype.element_ty), inside)


def gate_mul(
    gate: Float[Tensor, "*rows width"], up: Float[Tensor, "*rows width"], activation: Activation = "silu"
) -> Float[Tensor, "*rows width"]:
    """As in gate_mul_ref.py."""
    check_gate(gate, up)
    product = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if product.numel():
        gate, up = _by_row(gate), _by_row(up)
        rows, width = gate.shape
        arguments, options = (gate, up, product, gate.stride(0), up.stride(0), width), {"TILE": TILE}
        launch(_gate_mul, (rows, -(-width // TILE)), *arguments, ACTIVATION=activation, **options, on=gate)
    return product


def _by_row(branch: Float[Tensor, "*rows width"]) -> Float[Tensor, "rows width"]:
    """The branch with adjacent elements in a row: a view of one half of a product."""
    rows = branch.reshape(-1, branch.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
