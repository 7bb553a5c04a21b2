"""NVFP4 records to rows in float64, from the description of the format: it shares no line with the kernels' codecs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float64, Int, UInt8
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def values64(
    codes: UInt8[Tensor, "n code_bytes"], block_scales: UInt8[Tensor, "n groups"], scale: Tensor, width: int
) -> Float64[Tensor, "n width"]:
    """Two E2M1 codes a byte, the even column low; an E4M3 scale for 16 columns; a `scale` for each row, or for all."""
    codes, block_scales = codes.long(), block_scales.long()
    magnitudes = torch.tensor(_E2M1, dtype=torch.float64, device=codes.device)
    both = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    signed = magnitudes[both & 7] * (1 - 2 * (both >> 3))
    scales = _e4m3(block_scales) * scale.double().reshape(-1, 1)
    return (signed * scales.repeat_interleave(16, dim=1))[:, :width]


def rows64(
    buffer: UInt8[Tensor, " bytes"],
    counts: Sequence[int],
    offsets: Sequence[int],
    width: int,
    centroids: Tensor | None,
    centroid_of_record: Int[Tensor, " records"] | None,
) -> Float64[Tensor, "n width"]:
    """All rows of the records of `counts[k]` rows at byte `offsets[k]`: codes, an FP32 scale, with centroids a BF16
    projection for each row, block scales."""
    rows, groups = [], -(-width // 16)
    for k, (count, at) in enumerate(zip(counts, offsets, strict=True)):
        sizes = [count * groups * 8, 4, 0 if centroids is None else 2 * count, count * groups]
        codes, scale, projections, block_scales = buffer[at : at + sum(sizes)].split(sizes)
        values = values64(codes.view(count, -1), block_scales.view(count, -1), scale.clone().view(torch.float32), width)
        if centroids is not None and centroid_of_record is not None:
            of_row = projections.clone().view(torch.bfloat16).double()[:, None]
            values += of_row * centroids[centroid_of_record[k]].double()
        rows.append(values)
    return torch.cat(rows)


def _e4m3(codes: Int[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Positive ones: 4 bits of exponent, 3 of mantissa, subnormal at exponent 0; code 127 is NaN."""
    exponent, mantissa = codes >> 3, (codes & 7).double()
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.double() - 7))
    return value.where(codes != 127, torch.nan)
