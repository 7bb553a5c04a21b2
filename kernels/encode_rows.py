"""Rows to their codes in Triton: each is read once, and all that its codes hang on stays in registers."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from tiered.kernels.encode_rows_ref import BIAS, LEAST, LEAST_OF_TWO
from tiered.kernels.launch import launch
from tiered.kernels.nvfp4_bits import e4m3_codes, encode_groups, magnitude_bits
from tiered.kernels.nvfp4_scale import E2M1_MAX, E4M3_MAX, E4M3_NORMAL
from tiered.kernels.row_code import WORD

TILE = 4096  # elements of a program, or those of one row
_BIAS, _LEAST, _LEAST_OF_TWO = tl.constexpr(BIAS), tl.constexpr(LEAST), tl.constexpr(LEAST_OF_TWO)
_E2M1_MAX, _E4M3_MAX, _E4M3_NORMAL = tl.constexpr(E2M1_MAX), tl.constexpr(E4M3_MAX), tl.constexpr(E4M3_NORMAL)
_WORD = tl.constexpr(WORD)


@triton.jit
def _rounded_most(most):
    """Sixteenths and exponent of float32 from 0 on, as in encode_rows_ref.py; numbers below the normal ones count as if
    they were the least of those."""
    bits = most.to(tl.int32, bitcast=True)
    sixteenths = 8 + (((bits & 0x7FFFFF) + 0x7FFFF + ((bits >> 20) & 1)) >> 20)
    return tl.where(bits == 0, 0, sixteenths), tl.where(bits == 0, 0, (bits >> 23) - 126)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + _BIAS) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _encode_rows(
    values, coded, count,
    FP8: tl.constexpr, ELEMENTS: tl.constexpr, ROW_BYTES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_ELEMENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = row < count
    start = coded + row * ROW_BYTES
    if FP8:
        element = tl.arange(0, BLOCK_ELEMENTS)
        own = there[:, None] & (element < ELEMENTS)[None, :]
        value = tl.load(values + (row * ELEMENTS)[:, None] + element[None, :], own, other=0.0).to(tl.float32)
        most = tl.max(magnitude_bits(value), 1).to(tl.float32, bitcast=True)
        sixteenths, exponent = _rounded_most(most)
        exponent = tl.maximum(exponent - 9 + (sixteenths > 14).to(tl.int32), _LEAST)
        scaled = tl.minimum(tl.abs(value) * _power_of_two(-exponent)[:, None], _E4M3_MAX)
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        tl.store(start[:, None] + element[None, :], (e4m3_codes(scaled) | sign).to(tl.uint8), own)
        codes: tl.constexpr = ELEMENTS
    else:
        groups: tl.constexpr = BLOCK_ELEMENTS // 16
        group = tl.arange(0, groups)
        element = (group * 16)[:, None] + tl.arange(0, 16)[None, :]
        own = there[:, None, None] & (element < ELEMENTS)[None, :, :]
        value = tl.load(values + (row * ELEMENTS)[:, None, None] + element[None, :, :], own, other=0.0).to(tl.float32)
        most = tl.max(tl.max(magnitude_bits(value), 2), 1).to(tl.float32, bitcast=True)
        sixteenths, exponent = _rounded_most(tl.div_rn(most, _E2M1_MAX))
        exponent = tl.maximum(exponent - 8 + (sixteenths == 16).to(tl.int32), _LEAST_OF_TWO)
        pairs, block_scales = encode_groups(value, _power_of_two(exponent), _E4M3_NORMAL, BLOCK_ROWS, groups)
        real: tl.constexpr = (ELEMENTS + 15) // 16
        filled = there[:, None] & (group < real)[None, :]
        byte = (group * 8)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(start[:, None, None] + byte[None, :, :], pairs, filled[:, :, None])
        tl.store(start[:, None] + (real * 8 + group)[None, :], block_scales, filled)
        codes: tl.constexpr = real * 9
    last = tl.arange(0, _WORD)
    scale = tl.where((last == 0)[None, :], (exponent + _BIAS)[:, None], 0).to(tl.uint8)
    tl.store(start[:, None] + (codes + last)[None, :], scale, there[:, None] & (codes + last < ROW_BYTES)[None, :])


def encode_rows(values: Float[Tensor, "*rows elements"], code: str, row_bytes: int) -> UInt8[Tensor, "*rows row_bytes"]:
    """As in encode_rows_ref.py."""
    rows = values.contiguous()
    count, elements = rows.numel() // rows.shape[-1], rows.shape[-1]
    coded = torch.empty(*rows.shape[:-1], row_bytes, dtype=torch.uint8, device=rows.device)
    if count:
        block = tile_of(elements)
        launch(
            _encode_rows,
            (-(-count // block["BLOCK_ROWS"]),),
            rows,
            coded,
            count,
            FP8=code == "fp8",
            ELEMENTS=elements,
            ROW_BYTES=row_bytes,
            **block,
            enable_fp_fusion=False,
            on=rows,
        )
    return coded


def tile_of(elements: int) -> dict[str, int]:
    """Rows and elements of a program."""
    block = max(16, triton.next_power_of_2(elements))
    return {"BLOCK_ROWS": max(1, TILE // block), "BLOCK_ELEMENTS": block}
