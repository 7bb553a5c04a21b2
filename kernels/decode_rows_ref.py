"""Rows in the codes of row_code.py back to values, in plain torch."""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from tiered.kernels.nvfp4_decode_ref import decode_chunk, e4m3_values
from tiered.kernels.record_layout import CODE_BYTES, GROUP, chunks

_MANTISSA_BITS = 23


def decode_rows(
    coded: UInt8[Tensor, "*rows row_bytes"], code: str, elements: int, dtype: torch.dtype
) -> Float[Tensor, "*rows elements"]:
    """What `encode_rows` made of rows of `elements`. The product of a code and its scales is exact."""
    rows = coded.flatten(0, -2)
    values = torch.empty(len(rows), elements, dtype=dtype, device=coded.device)
    for part in chunks(len(rows), elements):
        values[part] = (_fp8_values if code == "fp8" else _nvfp4_values)(rows[part], elements)
    return values.view(*coded.shape[:-1], elements)


def _fp8_values(rows: UInt8[Tensor, "n row_bytes"], elements: int) -> Float32[Tensor, "n elements"]:
    return e4m3_values(rows[:, :elements]).mul_(_scale(rows[:, elements]))


def _nvfp4_values(rows: UInt8[Tensor, "n row_bytes"], elements: int) -> Float32[Tensor, "n elements"]:
    groups = -(-elements // GROUP)
    scales = groups * CODE_BYTES
    codes, block_scales, exponents = rows[:, :scales], rows[:, scales : scales + groups], rows[:, scales + groups]
    return decode_chunk(codes, block_scales, _scale(exponents)[:, 0])[:, :elements]


def _scale(exponents: UInt8[Tensor, " n"]) -> Float32[Tensor, "n 1"]:
    return (exponents.int() << _MANTISSA_BITS).view(torch.float32)[:, None]
