"""Rows of weights in the codes of weight_code.py back to values, in plain torch."""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from tiered.kernels.nvfp4_decode_ref import decode_chunk, e4m3_values, pair_values
from tiered.kernels.record_layout import chunks
from tiered.kernels.weight_code import WORD, WeightCode

_INT4 = (*range(8), *range(-8, 0))  # by code


def decode_weight(
    rows: UInt8[Tensor, "n row_bytes"], code: WeightCode, inner: int, dtype: torch.dtype
) -> Float[Tensor, "n inner"]:
    """Code times scale in float32 (of nvfp4, code times the product of both scales), then rounded to `dtype`."""
    values = torch.empty(len(rows), inner, dtype=dtype, device=rows.device)
    for part in chunks(len(rows), inner):
        values[part] = _DECODE[code](rows[part], inner)[:, :inner]
    return values


def row_scales(rows: UInt8[Tensor, "n row_bytes"], code: WeightCode, inner: int) -> Float32[Tensor, " n"]:
    """Of every row its own; not of int4."""
    at = code.row_scale(inner)
    return rows[:, at : at + WORD].contiguous().view(torch.float32).squeeze(1)


def _fp8(rows: UInt8[Tensor, "n row_bytes"], inner: int) -> Float32[Tensor, "n inner"]:
    return e4m3_values(rows[:, :inner]).mul_(row_scales(rows, WeightCode.FP8, inner)[:, None])


def _int8(rows: UInt8[Tensor, "n row_bytes"], inner: int) -> Float32[Tensor, "n inner"]:
    return rows[:, :inner].view(torch.int8).float().mul_(row_scales(rows, WeightCode.INT8, inner)[:, None])


def _int4(rows: UInt8[Tensor, "n row_bytes"], inner: int) -> Float32[Tensor, "n padded_inner"]:
    codes, end = WeightCode.INT4.code_bytes(inner), WeightCode.INT4.row_scale(inner)
    scales = rows[:, codes:end].contiguous().view(torch.bfloat16)[:, : WeightCode.INT4.groups(inner)]
    values = pair_values(rows[:, :codes], _INT4).unflatten(1, (-1, WeightCode.INT4.group))
    return values.mul_(scales[..., None]).flatten(1)


def _nvfp4(rows: UInt8[Tensor, "n row_bytes"], inner: int) -> Float32[Tensor, "n padded_inner"]:
    codes, groups = WeightCode.NVFP4.code_bytes(inner), WeightCode.NVFP4.groups(inner)
    return decode_chunk(rows[:, :codes], rows[:, codes : codes + groups], row_scales(rows, WeightCode.NVFP4, inner))


_DECODE = {WeightCode.FP8: _fp8, WeightCode.INT8: _int8, WeightCode.INT4: _int4, WeightCode.NVFP4: _nvfp4}
