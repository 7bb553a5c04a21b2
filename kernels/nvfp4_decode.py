"""NVFP4 codes and block scales to rows, in Triton."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from tiered.kernels.compilation import Compilation
from tiered.kernels.nvfp4_bits import decode_groups
from tiered.kernels.nvfp4_decode_ref import check_parts

BLOCK_ROWS = 4
BLOCK_GROUPS = 64


@triton.jit
def _decode(
    codes,
    block_scales,
    scale,
    scale_stride,
    out,
    rows,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    real = row < rows
    inside = real[:, None] & (group < GROUPS)[None, :]
    at = (row * GROUPS)[:, None] + group[None, :]
    block_scale = tl.load(block_scales + at, inside, other=0)
    code = tl.load(codes + at[:, :, None] * 8 + tl.arange(0, 8)[None, None, :], inside[:, :, None], other=0)
    values = decode_groups(code, block_scale, tl.load(scale + row * scale_stride, real, other=1))
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = real[:, None, None] & (column < WIDTH)[None, :, :]
    tl.store(out + (row * WIDTH)[:, None, None] + column[None, :, :], values.to(out.dtype.element_ty), mask)


def nvfp4_decode(
    codes: UInt8[Tensor, "n code_bytes"],
    block_scales: UInt8[Tensor, "n groups"],
    scale: Float32[Tensor, " n"],
    width: int,
    dtype: torch.dtype,
) -> Float[Tensor, "n width"]:
    """As in nvfp4_decode_ref.py."""
    check_parts(codes, block_scales, scale, width)
    n, groups = block_scales.shape
    out = torch.empty(n, width, dtype=dtype, device=codes.device)
    if n == 0:
        return out
    block_groups = min(BLOCK_GROUPS, triton.next_power_of_2(groups))
    with torch.cuda.device_of(codes):
        _decode[triton.cdiv(n, BLOCK_ROWS), triton.cdiv(groups, block_groups)](
            codes.contiguous(),
            block_scales.contiguous(),
            scale,
            scale.stride(0),
            out,
            n,
            WIDTH=width,
            GROUPS=groups,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_GROUPS=block_groups,
            enable_fp_fusion=False,
        )
    return out


COMPILATIONS = tuple(
    Compilation(
        kernel=_decode,
        signature={
            "codes": "*u8",
            "block_scales": "*u8",
            "scale": "*fp32",
            "scale_stride": "i32",
            "out": f"*{dtype}",
            "rows": "i32",
            **dict.fromkeys(["WIDTH", "GROUPS", "BLOCK_ROWS", "BLOCK_GROUPS"], "constexpr"),
        },
        constexprs={"WIDTH": 4096, "GROUPS": 256, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_GROUPS": BLOCK_GROUPS},
        fp_fusion=False,
    )
    for dtype in ["bf16", "fp32"]
)
