"""Rows to NVFP4 codes and block scales, in Triton."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from tiered.kernels.compilation import Compilation
from tiered.kernels.nvfp4_bits import encode_groups
from tiered.kernels.nvfp4_encode_ref import check_scale
from tiered.kernels.record_layout import CODE_BYTES, GROUP

BLOCK_ROWS = 4
BLOCK_GROUPS = 64


@triton.jit
def _encode(
    values,
    row_stride,
    scale,
    scale_stride,
    codes,
    block_scales,
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
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = real[:, None, None] & (column < WIDTH)[None, :, :]
    x = tl.load(values + (row * row_stride)[:, None, None] + column[None, :, :], mask, other=0).to(tl.float32)
    code, block_scale = encode_groups(x, tl.load(scale + row * scale_stride, real, other=1), BLOCK_ROWS, BLOCK_GROUPS)
    at = (row * GROUPS)[:, None] + group[None, :]
    tl.store(block_scales + at, block_scale, inside)
    tl.store(codes + at[:, :, None] * 8 + tl.arange(0, 8)[None, None, :], code, inside[:, :, None])


def nvfp4_encode(
    values: Float[Tensor, "n width"], scale: Float32[Tensor, " n"]
) -> tuple[UInt8[Tensor, "n code_bytes"], UInt8[Tensor, "n groups"]]:
    """As in nvfp4_encode_ref.py, but that values which are not finite raise nothing."""
    check_scale(values, scale)
    n, width = values.shape
    groups = -(-width // GROUP)
    codes = torch.empty(n, groups * CODE_BYTES, dtype=torch.uint8, device=values.device)
    block_scales = torch.empty(n, groups, dtype=torch.uint8, device=values.device)
    if n == 0:
        return codes, block_scales
    values = values if values.stride(1) == 1 else values.contiguous()
    block_groups = min(BLOCK_GROUPS, triton.next_power_of_2(groups))
    with torch.cuda.device_of(values):
        _encode[triton.cdiv(n, BLOCK_ROWS), triton.cdiv(groups, block_groups)](
            values,
            values.stride(0),
            scale,
            scale.stride(0),
            codes,
            block_scales,
            n,
            WIDTH=width,
            GROUPS=groups,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_GROUPS=block_groups,
            enable_fp_fusion=False,
        )
    return codes, block_scales


COMPILATIONS = tuple(
    Compilation(
        kernel=_encode,
        signature={
            "values": f"*{dtype}",
            "row_stride": "i32",
            "scale": "*fp32",
            "scale_stride": "i32",
            "codes": "*u8",
            "block_scales": "*u8",
            "rows": "i32",
            **dict.fromkeys(["WIDTH", "GROUPS", "BLOCK_ROWS", "BLOCK_GROUPS"], "constexpr"),
        },
        constexprs={"WIDTH": 4096, "GROUPS": 256, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_GROUPS": BLOCK_GROUPS},
        fp_fusion=False,
    )
    for dtype in ["bf16", "fp32"]
)
