"""The parts of a weight that a checkpoint holds in codes, to the layout of ours: no code changes."""

from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from tiered.kernels.encode_weight_ref import packed, paired
from tiered.kernels.weight_code import WeightCode
from tiered.models.quantised import CodedParts, Part

_NEGATIVE = 0x80  # from here on E4M3 has a sign


def coded_bytes(
    parts: CodedParts, shape: tuple[int, int], read: Callable[[Part], Tensor]
) -> UInt8[Tensor, "out row_bytes"]:
    """A weight of `shape` in the layout of weight_code.py, on the device where `read` puts its `parts`.

    Raises:
        ValueError: a zero point that is not zero, a code out of range, or a block scale below zero.
    """
    out, inner = shape
    if parts.zeros and read(parts.zeros).any():
        raise ValueError(f"{parts.zeros.name} is not all zeros: weights in asymmetric codes are not read")
    codes = read(parts.codes)
    if parts.code is WeightCode.INT4:
        if codes.min() < -8 or codes.max() > 7:
            raise ValueError(f"{parts.codes.name} has codes out of the range of int4, -8 to 7")
        codes = paired(codes)
    block_scales = None
    if parts.block_scales:
        block_scales = read(parts.block_scales).view(torch.uint8)
        if parts.code is WeightCode.NVFP4 and block_scales.max() >= _NEGATIVE:
            raise ValueError(f"{parts.block_scales.name} has scales below zero")
        if parts.swizzled:
            block_scales = unswizzled(block_scales, out, parts.code.groups(inner))
    return packed(parts.code, inner, codes.view(torch.uint8), block_scales, _row_scale(parts, out, codes.device, read))


def unswizzled(scales: UInt8[Tensor, "padded groups_padded"], out: int, groups: int) -> UInt8[Tensor, "out groups"]:
    """Block scales in rows again. They lie in tiles of 128 rows and 4 groups, the rows r, r + 32, r + 64 and r + 96
    beside each other (cuBLAS, layout of 1D block scaling factors)."""
    down, across = -(-out // 128), -(-groups // 4)
    tiles = scales.reshape(down, across, 32, 4, 4).transpose(2, 3)
    return tiles.reshape(down, across, 128, 4).transpose(1, 2).reshape(down * 128, across * 4)[:out, :groups]


def _row_scale(
    parts: CodedParts, out: int, device: torch.device, read: Callable[[Part], Tensor]
) -> Float[Tensor, " out"] | None:
    if parts.code is WeightCode.INT4:
        return None
    if parts.scale is None:
        return torch.ones(out, device=device)
    scale = read(parts.scale).float().flatten().expand(out)
    return scale.reciprocal() if parts.divides else scale
