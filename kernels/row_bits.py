"""Rows in the codes of row_code.py inside Triton kernels: arithmetic by bits, exact on every GPU.

Before Hopper there is no E4M3 and before Blackwell no E2M1, and Triton's interpreter rounds FP8 wrongly. A code's
exponent and mantissa, put where those of a float32 begin, are its value times a power of two: its numbers below the
normal ones become such of float32, so that one product serves all codes.
"""

import triton
import triton.language as tl

from tiered.kernels.nvfp4_bits import e4m3_values

_E4M3 = tl.constexpr(2.0**120)  # float32's bias of 127 over that of 7
_E2M1 = tl.constexpr(2.0**126)  # and over that of 1


@triton.jit
def row_scales(exponents):
    """E8M0 as uint8, from 1 on, to float32."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_values(codes):
    """E4M3 as uint8, no NaN, to float32."""
    bits = codes.to(tl.uint32)
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * _E4M3


@triton.jit
def nvfp4_values(codes, block_scales, scale, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """codes [ROWS, GROUPS, 8] and block scales [ROWS, GROUPS], uint8, with the float32 scale [ROWS] of each row → the
    values of even columns and those of odd ones, float32 [ROWS, GROUPS · 8] each."""
    factor = (scale[:, None] * e4m3_values(block_scales.to(tl.int32)))[:, :, None]
    pairs = codes.to(tl.uint32)
    even = (((pairs & 0x08) << 28) | ((pairs & 0x07) << 22)).to(tl.float32, bitcast=True) * _E2M1 * factor
    odd = (((pairs & 0x80) << 24) | ((pairs & 0x70) << 18)).to(tl.float32, bitcast=True) * _E2M1 * factor
    return tl.reshape(even, (ROWS, GROUPS * 8)), tl.reshape(odd, (ROWS, GROUPS * 8))
