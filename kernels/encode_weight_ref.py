"""Weights to the codes of weight_code.py, in plain torch on every device: it is done once, while they are loaded."""

import torch
from jaxtyping import Float, Float32, Int8, UInt8
from torch import Tensor
from torch.nn.functional import pad

from tiered.kernels.nvfp4_encode_ref import encode_chunk
from tiered.kernels.nvfp4_scale import E4M3_MAX, SCALE_MIN, nvfp4_scale, scale_to
from tiered.kernels.record_layout import chunks
from tiered.kernels.weight_code import WORD, WeightCode

_INT8_MAX, _INT4_MIN, _INT4_MAX = 127.0, -8.0, 7.0


def encode_weight(
    values: Float[Tensor, "out inner"], code: WeightCode, into: UInt8[Tensor, "out row_bytes"] | None = None
) -> UInt8[Tensor, "out row_bytes"]:
    """`values`, all finite, row by row, a bounded number of elements at a time. To nearest, ties to even. `into`: where
    they go; None: memory of their own, on the device of `values`."""
    out, inner = values.shape
    coded = torch.empty(out, code.row_bytes(inner), dtype=torch.uint8, device=values.device) if into is None else into
    for part in chunks(out, inner):
        coded[part] = packed(code, inner, *_ENCODE[code](values[part].float()))
    return coded


def packed(
    code: WeightCode,
    inner: int,
    codes: UInt8[Tensor, "n code_bytes"],
    block_scales: UInt8[Tensor, "n scale_bytes"] | None,
    scale: Float32[Tensor, " n"] | None,
) -> UInt8[Tensor, "n row_bytes"]:
    """Rows of `inner` elements, of their parts; None: `code` has no such scales."""
    rows = torch.zeros(len(codes), code.row_bytes(inner), dtype=torch.uint8, device=codes.device)
    rows[:, : codes.shape[1]] = codes
    if block_scales is not None:
        at = code.code_bytes(inner)
        rows[:, at : at + block_scales.shape[1]] = block_scales
    if scale is not None:
        at = code.row_scale(inner)
        rows[:, at : at + WORD] = scale.contiguous().view(torch.uint8).view(-1, WORD)
    return rows


def paired(codes: Int8[Tensor, "n columns"]) -> UInt8[Tensor, "n code_bytes"]:
    """Codes of 4 bits, two a byte, even column low."""
    return (codes[:, ::2] & 15 | codes[:, 1::2] << 4).view(torch.uint8)


def _fp8(values: Float32[Tensor, "n inner"]) -> tuple[Tensor, None, Tensor]:
    scale = scale_to(E4M3_MAX, values.abs().amax(1))
    # What a rounded quotient has above the largest number would be rounded to it, or to NaN: that differs by version.
    scaled = (values / scale[:, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), None, scale


def _int8(values: Float32[Tensor, "n inner"]) -> tuple[Tensor, None, Tensor]:
    scale = scale_to(_INT8_MAX, values.abs().amax(1))
    codes = (values / scale[:, None]).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return codes.to(torch.int8).view(torch.uint8), None, scale


def _int4(values: Float32[Tensor, "n inner"]) -> tuple[Tensor, Tensor, None]:
    """The largest of a group becomes -8, whatever its sign: its scale may be negative, and all 16 codes serve."""
    group = WeightCode.INT4.group
    groups = pad(values, (0, -values.shape[1] % group)).unflatten(1, (-1, group))
    most = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / _INT4_MIN
    scale = most.masked_fill(most.abs() < SCALE_MIN, 1.0).bfloat16()
    codes = (groups / scale.float()).round_().clamp_(_INT4_MIN, _INT4_MAX).to(torch.int8).flatten(1)
    return paired(codes), scale.squeeze(2).view(torch.uint8), None


def _nvfp4(values: Float32[Tensor, "n inner"]) -> tuple[Tensor, Tensor, Tensor]:
    scale = nvfp4_scale(values.abs().amax(1))
    return *encode_chunk(values, scale), scale


_ENCODE = {WeightCode.FP8: _fp8, WeightCode.INT8: _int8, WeightCode.INT4: _int4, WeightCode.NVFP4: _nvfp4}
