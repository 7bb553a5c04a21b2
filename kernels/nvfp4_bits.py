"""NVFP4 inside Triton kernels: where the rows of packed records lie, and arithmetic by bits.

Triton's interpreter rounds FP8 and BF16 wrongly, GPUs before Hopper have no E4M3 and those before Blackwell no E2M1.
The arithmetic here is exact on all of them, where contraction to FMA is off.
"""

import triton
import triton.language as tl

from tiered.kernels.nvfp4_scale import E2M1_MAX, E4M3_MAX, E4M3_MIN, SCALE_MIN

_E2M1_MAX = tl.constexpr(E2M1_MAX)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E4M3_MIN = tl.constexpr(E4M3_MIN)
_SCALE_MIN = tl.constexpr(SCALE_MIN)
_SCALE_DIVISOR = tl.constexpr(E2M1_MAX * E4M3_MAX)
_ONE = tl.constexpr(0x3F800000)  # bits of 1.0
_EXPONENT = tl.constexpr(0x7F800000)  # bits of infinity; those of NaN are larger
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def magnitude_bits(values):
    """Bits of |values| as int32. They order like the values, with infinity and NaN above all."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def record_scale(amax_bits):
    """`nvfp4_scale` of the float32 whose bits these are; NaN where it is not finite, so that the record decodes to
    NaN and to nothing that looks like numbers."""
    scale = tl.maximum(tl.div_rn(amax_bits.to(tl.float32, bitcast=True), _SCALE_DIVISOR), _SCALE_MIN)
    scale = tl.where(amax_bits == 0, 1.0, scale)
    return tl.where(amax_bits >= _EXPONENT, float("nan"), scale)


@triton.jit
def encode_groups(values, scale, least, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """values [ROWS, GROUPS, 16] with the FP32 scale [ROWS] of each row → codes [ROWS, GROUPS, 8], two a byte, and
    block scales [ROWS, GROUPS], `least` and more, as uint8."""
    amax = tl.max(magnitude_bits(values), axis=2).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(tl.div_rn(amax, _E2M1_MAX), scale[:, None])
    block_scales = e4m3_codes(tl.minimum(tl.maximum(wanted, least), _E4M3_MAX))
    factor = tl.div_rn(tl.div_rn(1.0, scale)[:, None], e4m3_values(block_scales))
    scaled = tl.minimum(tl.maximum(values * factor[:, :, None], -_E2M1_MAX), _E2M1_MAX)
    low, high = tl.split(tl.reshape(_e2m1(scaled), (ROWS, GROUPS, 8, 2)))
    return (low | (high << 4)).to(tl.uint8), block_scales.to(tl.uint8)


@triton.jit
def decode_groups(codes, block_scales, scale):
    """codes [ROWS, GROUPS, 8] and block scales [ROWS, GROUPS], uint8, with the FP32 scale [ROWS] of each row → values
    [ROWS, GROUPS, 16]."""
    # The values below come as halves; halving the scale is exact, since SCALE_MIN keeps it above the subnormals.
    half = (0.5 * (scale[:, None] * e4m3_values(block_scales.to(tl.int32))))[:, :, None]
    pair = codes.to(tl.uint32)
    return tl.interleave(_e2m1_halves(pair & 15) * half, _e2m1_halves(pair >> 4) * half)


@triton.jit
def e4m3_values(codes):
    """int32 codes, not negative nor NaN, to float32."""
    normal = ((codes << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(codes < 8, codes.to(tl.float32) * _E4M3_MIN, normal)


@triton.jit
def bf16_bits(values):
    """float32 to the bits of the nearest BF16, ties to even, as uint16; 0 where that is infinite or NaN."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(magnitude_bits(values) < 0x7F7F8000, rounded, 0).to(tl.uint16)


@triton.jit
def bf16_values(bits):
    """The float32 of BF16 bits."""
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
    """float32 within ±6 to the nearest E2M1, ties to even, as int32: see nvfp4_encode_ref.py."""
    bits = values.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & _EXPONENT, _ONE)
    magic = power + (22 << 23)
    steps = (tl.abs(values) + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    return (steps + ((power - _ONE) >> 22)) | ((bits >> 28) & 8)


@triton.jit
def _e2m1_halves(codes):
    """uint32 codes to twice their values, as float32: the eight magnitudes are the nibbles of one word."""
    magnitude = (0xC8643210 >> ((codes & 7) * 4)) & 15
    bits = magnitude.to(tl.float32).to(tl.uint32, bitcast=True) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def record_rows(row, real, starts, at, record_of_row, GROUPS: tl.constexpr, DELTA: tl.constexpr):
    """For rows [ROWS] of a table, where `real`: their record, and the bytes at which their codes, their record's
    scale, their projection and their block scales begin; all int64."""
    record = tl.load(record_of_row + row, real, other=0)
    start = tl.load(starts + record, real, other=0)
    count = tl.load(starts + record + 1, real, other=0) - start
    # The compiler must know that records are aligned, to load several codes at once.
    base = tl.multiple_of(tl.load(at + record, real, other=0), [128])
    within = row - start
    codes = base + within * (GROUPS * 8)
    scale = base + count * (GROUPS * 8)
    projection = scale + 4 + within * 2
    block_scales = scale + 4 + within * GROUPS
    if DELTA:
        block_scales += count * 2
    return record, codes, scale, projection, block_scales
