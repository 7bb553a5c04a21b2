"""Rows in the codes of row_code.py inside Triton kernels: arithmetic by bits, exact on every GPU.

There is no E4M3 before Hopper and no E2M1 before Blackwell, and Triton's interpreter rounds FP8 and BF16 wrongly. So a
code's exponent and mantissa are moved to those of a float32. The result is the code's value times a power of two.
Subnormal codes become subnormal float32 numbers, so one product serves all codes. Kernels that encode must be compiled
without contraction to FMA.
"""

import triton
import triton.language as tl

from tiered.kernels.encode_rows_ref import E2M1_MAX, E4M3_MAX, E4M3_MIN, NOT_FINITE

_E2M1_MAX, _E4M3_MAX, _E4M3_MIN = tl.constexpr(E2M1_MAX), tl.constexpr(E4M3_MAX), tl.constexpr(E4M3_MIN)
_E4M3 = tl.constexpr(2.0**120)  # exponent: float32's bias of 127 minus 7
_E2M1 = tl.constexpr(2.0**126)  # exponent: 127 minus 1
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_ONE = tl.constexpr(0x3F800000)  # bits of 1.0
_EXPONENT = tl.constexpr(0x7F800000)  # bits of infinity
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def byte_at(row, at, own):
    """Byte `at` of rows of whole words, as uint32; 0 where not `own`. Its word is loaded, because a copy to shared
    memory past the registers has at least 4 bytes. A loop would wait in every turn for a byte by itself."""
    word = (row + at // 4 * 4).to(tl.pointer_type(tl.uint32), bitcast=True)
    return (tl.load(word, own, other=0) >> (at % 4 * 8)) & 0xFF


@triton.jit
def row_scales(exponents):
    """Codes in E8M0 to float32, from 1 on; the mark of a row that was not finite becomes NaN."""
    scale = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponents == _NOT_FINITE, float("nan"), scale)


@triton.jit
def fp8_values(codes):
    """uint8 E4M3 without NaN to float32."""
    bits = codes.to(tl.uint32)
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * _E4M3


@triton.jit
def nvfp4_values(codes, block_scales, scale, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Values of even columns and of odd columns, float32 [ROWS, GROUPS · 8] each.

    codes: uint8 [ROWS, GROUPS, 8]. block_scales: uint8 [ROWS, GROUPS]. scale: float32 [ROWS].
    """
    factor = (scale[:, None] * e4m3_values(block_scales.to(tl.int32)))[:, :, None]
    pairs = codes.to(tl.uint32)
    even = (((pairs & 0x08) << 28) | ((pairs & 0x07) << 22)).to(tl.float32, bitcast=True) * _E2M1 * factor
    odd = (((pairs & 0x80) << 24) | ((pairs & 0x70) << 18)).to(tl.float32, bitcast=True) * _E2M1 * factor
    return tl.reshape(even, (ROWS, GROUPS * 8)), tl.reshape(odd, (ROWS, GROUPS * 8))


@triton.jit
def magnitude_bits(values):
    """Bits of |values| as int32. They order like the values, with infinity and NaN above all."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def encode_groups(values, scale, least, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Codes, uint8 [ROWS, GROUPS, 8], two a byte, and scales of groups, uint8 [ROWS, GROUPS], at least `least`.

    values: [ROWS, GROUPS, 16]. scale: float32 [ROWS].
    """
    amax = tl.max(magnitude_bits(values), axis=2).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(tl.div_rn(amax, _E2M1_MAX), scale[:, None])
    block_scales = e4m3_codes(tl.minimum(tl.maximum(wanted, least), _E4M3_MAX))
    factor = tl.div_rn(tl.div_rn(1.0, scale)[:, None], e4m3_values(block_scales))
    scaled = tl.minimum(tl.maximum(values * factor[:, :, None], -_E2M1_MAX), _E2M1_MAX)
    low, high = tl.split(tl.reshape(_e2m1(scaled), (ROWS, GROUPS, 8, 2)))
    return (low | (high << 4)).to(tl.uint8), block_scales.to(tl.uint8)


@triton.jit
def e4m3_values(codes):
    """int32 codes, neither negative nor NaN, to float32."""
    normal = ((codes << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(codes < 8, codes.to(tl.float32) * _E4M3_MIN, normal)


@triton.jit
def bf16_bits(values):
    """float32 to the bits of the nearest BF16, ties to even, as uint16; 0 if that is infinite or NaN."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(magnitude_bits(values) < 0x7F7F8000, rounded, 0).to(tl.uint16)


@triton.jit
def bf16_values(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_codes(values):
    """float32 from 0 to 448 to the nearest E4M3, ties to even, as int32."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the codes count steps of 2^-9: adding 2^23 rounds to whole steps.
    steps = (values * 512 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    return tl.where(values < 2.0**-6, steps, normal)


@triton.jit
def _e2m1(values):
    """float32 within ±6 to the nearest E2M1, ties to even, as int32: see encode_rows_ref.py."""
    bits = values.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & _EXPONENT, _ONE)
    magic = power + (22 << 23)
    steps = (tl.abs(values) + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    return (steps + ((power - _ONE) >> 22)) | ((bits >> 28) & 8)
