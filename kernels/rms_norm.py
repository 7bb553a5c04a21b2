"""Root-mean-square norm, most often with a weight, in Triton: a program a row, which reads it once. It may add a branch
to the row first."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.launch import launch, power_of_2, warps_of_row
from tiered.kernels.rms_norm_ref import Hidden, check_norm


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    hidden, branch, weight, normed, batch_step, row_step, rows, width, eps, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, BLOCK)
    inside = element < width
    at = hidden + batch * batch_step + row * row_step
    own = (batch * rows + row) * width  # a number of the row, as `at`: addresses of elements would fill registers
    dtype: tl.constexpr = normed.dtype.element_ty
    x = tl.load(at + element, inside, other=0.0).to(tl.float32)
    if branch is not None:
        x = (x + tl.load(branch + own + element, inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at + element, x, inside)
        x = x.to(tl.float32)
    if weight is not None:
        scale = tl.load(weight + element, inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / width + eps)
    if weight is not None:
        x = x.to(dtype).to(tl.float32) * scale if OFFSET is None else (OFFSET + scale) * x
    tl.store(normed + own + element, x.to(dtype), inside)


def rms_norm(
    hidden: Hidden,
    weight: Float[Tensor, " width"] | None,
    eps: float,
    *,
    offset: float | None = None,
    branch: Hidden | None = None,
) -> Hidden:
    """As in rms_norm_ref.py."""
    check_norm(hidden, weight, branch)
    batch, rows, width = hidden.shape
    if branch is not None and hidden.stride(2) != 1:
        hidden.add_(branch)
        branch = None
    hidden = hidden if hidden.stride(2) == 1 else hidden.contiguous()
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if normed.numel() == 0:
        return normed
    block = power_of_2(width)
    weight = None if weight is None else weight.contiguous()
    branch = None if branch is None else branch.contiguous()
    arguments = hidden, branch, weight, normed, *hidden.stride()[:2], rows, width, eps
    options = {"OFFSET": offset, "BLOCK": block, "num_warps": warps_of_row(block)}
    launch(_rms_norm, (rows, batch), *arguments, **options, on=hidden)
    return normed
