"""Rows to the codes of row_code.py: the oracle, in plain torch, used on the CPU. For the codes of weights it is used on
every device.

The formulas of nvfp4 are those of torchao 0.18 (`nvfp4_quantize` with a per-tensor scale, here per row), with one
exception. The scales of a weight's groups go down to 2^-9, the smallest number of E4M3, not 2^-6. So small groups keep
three more bits.
"""

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Float32, Int8, Int64, UInt8
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import GROUP, PROJECTION_BYTES, WORD, Code, chunks

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the smallest positive number, and the scale of a group of zeros, or
E4M3_NORMAL = 2.0**-6  # the smallest normal number
BIAS, LEAST = 127, -126  # of the exponents of E8M0, which are float32's; the least is that of float32's normal numbers
LEAST_OF_TWO = -116  # for the scale of a row whose groups have scales too
NOT_FINITE = 255  # in place of an exponent

# The least scale for which 1 / scale / E4M3_MIN does not overflow, and the smallest decoded value, half of
# scale · E4M3_MIN, is not subnormal. So devices that flush subnormals agree with those that do not.
SCALE_MIN = 2.0**LEAST_OF_TWO

_INT8_MAX, _INT4_MIN, _INT4_MAX = 127.0, -8.0, 7.0
_MANTISSA_BITS = 23
_ONE, _EXPONENT = 0x3F800000, 0x7F800000  # bits of 1.0 and of infinity
_FIRST = -((_ONE >> 22) + (22 << 1)) % 256  # even, so that rounding ties is unchanged

# Codes, the bytes of the scales of groups, and the scale of each row; None for scales that a code does not have.
Coded = tuple[UInt8[Tensor, "n code_bytes"], UInt8[Tensor, "n scale_bytes"] | None, Float32[Tensor, " n"] | None]


def encode_rows(
    values: Float[Tensor, "n elements"],
    code: Code,
    out: UInt8[Tensor, "rows row_bytes"],
    numbers: Int64[Tensor, " n"] | None = None,
    base: RowBase | None = None,
) -> None:
    """Write the codes of rows, or of their residuals against a base, to `out`; other bytes stay unchanged.

    Rounds to nearest, ties to even, a bounded number of elements at a time. The residual is rounded, not the row. In
    nvfp4 its error is about 9.5 % of the residual's norm.

    Args:
        values: rows. With a scale in E8M0, a row that is not finite, or whose residual is not, decodes to NaN. With
            other scales rows must be finite.
        code: code of the rows.
        out: bytes of rows, on the device of `values`; in plain torch and without `numbers` on any device.
        numbers: distinct rows of `out`; None for its first n, in order.
        base: bases of residuals; None to code the rows themselves.
    """
    elements = values.shape[1]
    squares = None if base is None else base.squares()
    for part in chunks(len(values), elements):
        rows, end = values[part].float(), out.shape[1]
        there = out[part] if numbers is None and out.device == rows.device else None
        some = torch.empty(len(rows), end, dtype=torch.uint8, device=rows.device) if there is None else there
        if base is not None and squares is not None:
            projections = base.projections(values[part], part, squares)
            # Against the rounded projection, because decoding uses that one.
            rows = rows - base.taken(part).float().mul_(projections[:, None].float())
            end -= PROJECTION_BYTES
            some[:, end:] = projections.view(torch.uint8).view(-1, PROJECTION_BYTES)
        pack(some[:, :end], code, elements, _ENCODE[code](rows, code))
        if numbers is not None:
            out.index_copy_(0, numbers[part], some)
        elif there is None:
            out[part] = some


def pack(rows: UInt8[Tensor, "n row_bytes"], code: Code, elements: int, parts: Coded) -> None:
    """Write the parts of rows of `elements` to their places, and zeros between them."""
    codes, block_scales, scale = parts
    rows[:, : codes.shape[1]] = codes
    rows[:, codes.shape[1] :] = 0
    if block_scales is not None:
        begin = code.code_bytes(elements)
        rows[:, begin : begin + block_scales.shape[1]] = block_scales
    if scale is not None:
        begin, bits = code.scale_at(elements), scale.contiguous().view(torch.int32)
        stored = bits.view(torch.uint8).view(-1, WORD) if code.row_scale == WORD else (bits >> _MANTISSA_BITS)[:, None]
        rows[:, begin : begin + code.row_scale] = stored


def paired(codes: Int8[Tensor, "n columns"]) -> UInt8[Tensor, "n code_bytes"]:
    """Codes of int4, two a byte, even column low."""
    return (codes[:, ::2] & 15 | codes[:, 1::2] << 4).view(torch.uint8)


def encode_groups(
    values: Float32[Tensor, "n width"], scale: Float32[Tensor, " n"], least: float
) -> tuple[UInt8[Tensor, "n code_bytes"], UInt8[Tensor, "n groups"]]:
    """Codes of nvfp4, and scales of groups, of a few rows under the scale of each row. There is at least one row, all
    are finite, and the scales are at least `least`. -0 stays -0."""
    n, width = values.shape
    values = pad(values, (0, -width % GROUP)) if width % GROUP else values.contiguous()
    # Maximum of each group: on the CPU several times as fast as a reduction over so few columns.
    amax = max_pool1d(values.abs().view(1, -1), GROUP).view(n, -1)
    row_scale = scale[:, None]
    wanted = (amax / _divisor(E2M1_MAX, amax) / row_scale).clamp(least, E4M3_MAX)
    block_scales = wanted.to(torch.float8_e4m3fn)
    # torchao computes two divisions and a product, in this order.
    factor = 1 / row_scale / block_scales.float()
    scaled = (values.view(n, -1, GROUP) * factor[..., None]).clamp_(-E2M1_MAX, E2M1_MAX)
    return _pack_pairs(_e2m1(scaled).flatten(1)), block_scales.view(torch.uint8)


def scale_to(most: float, amax: Float32[Tensor, "*rows"]) -> Float32[Tensor, "*rows"]:
    """The scale that maps `amax` to `most`, at least SCALE_MIN. It is 1 for zeros, where torchao divides by zero, and
    not finite if amax is not."""
    return (amax / _divisor(most, amax)).clamp(min=SCALE_MIN).masked_fill(amax == 0, 1.0)


def _fp8(values: Float32[Tensor, "n width"], code: Code) -> Coded:
    scale = _row_scale(code, E4M3_MAX, values)
    # Clamped, because a quotient rounded above the largest number becomes that or NaN, depending on torch's version.
    scaled = (values / scale[:, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), None, scale


def _nvfp4(values: Float32[Tensor, "n width"], code: Code) -> Coded:
    amax = values.abs().amax(1)
    if code.row_scale == WORD:
        scale, least = scale_to(E2M1_MAX * E4M3_MAX, amax), E4M3_MIN
    else:
        # The largest scale of a group is 124 to 248, and all are normal, so decoded rows encode to the same bytes.
        scale, least = _power_of_two(240.0, amax / _divisor(E2M1_MAX, amax), LEAST_OF_TWO), E4M3_NORMAL
    return *encode_groups(values, scale, least), scale


def _int8(values: Float32[Tensor, "n inner"], code: Code) -> Coded:
    scale = _row_scale(code, _INT8_MAX, values)
    codes = (values / scale[:, None]).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return codes.to(torch.int8).view(torch.uint8), None, scale


def _int4(values: Float32[Tensor, "n inner"], code: Code) -> Coded:
    """The largest of a group becomes -8, whatever its sign: its scale may be negative, and all 16 codes are used."""
    groups = pad(values, (0, -values.shape[1] % code.group)).unflatten(1, (-1, code.group))
    most = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / _INT4_MIN
    scale = most.masked_fill(most.abs() < SCALE_MIN, 1.0).bfloat16()
    codes = (groups / scale.float()).round_().clamp_(_INT4_MIN, _INT4_MAX).to(torch.int8).flatten(1)
    return paired(codes), scale.squeeze(2).view(torch.uint8), None


# By name: codes of one name have the same elements, whatever the scale of their rows.
_ENCODE: Mapping[str, Callable[[Tensor, Code], Coded]] = {"fp8": _fp8, "nvfp4": _nvfp4, "int8": _int8, "int4": _int4}


def _row_scale(code: Code, most: float, values: Float32[Tensor, "n width"]) -> Float32[Tensor, " n"]:
    amax = values.abs().amax(1)
    return scale_to(most, amax) if code.row_scale == WORD else _power_of_two(most, amax, LEAST)


def _power_of_two(most: float, amax: Float32[Tensor, " n"], least: int) -> Float32[Tensor, " n"]:
    """The least power of two, at least 2^`least`, that maps `amax`, rounded to four bits, to `most` or below. NaN if
    `amax` is not finite. It is the same for the decoded rows, because the largest is rounded first."""
    (whole, power), (mantissa, exponent) = math.frexp(most), amax.frexp()
    exponent = (exponent - power + ((16 * mantissa).round() > 16 * whole).int()).clamp_min(least)
    return torch.ldexp(torch.ones_like(amax), exponent).where(amax.isfinite(), torch.nan)


def _e2m1(values: Float32[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """4-bit codes of values, which must be within ±6."""
    bits = values.view(torch.int32)
    # Take the power of two below |value|, at least 1. A float of 2^22 times that power has steps of half of it, which
    # are the steps of E2M1. So the addition rounds, and the lowest byte of the sum counts the steps. The bits of the
    # power count two codes for each power above 1, and `_FIRST` makes both counts together begin at 0.
    magic = (bits & _EXPONENT).clamp_(min=_ONE).add_((22 << 23) + _FIRST)
    code = values.abs().add_(magic.view(torch.float32)).view(torch.int32).add_(magic.bitwise_right_shift_(22))
    return code.sub_(bits.bitwise_right_shift_(31), alpha=8).to(torch.uint8)


def _pack_pairs(codes: UInt8[Tensor, "n columns"]) -> UInt8[Tensor, "n code_bytes"]:
    """Two 4-bit codes a byte: both nibbles are in a little-endian 16-bit word, four bits apart."""
    words = codes.view(torch.int16)
    return words.bitwise_or(words >> 4).to(torch.uint8)


def _divisor(value: float, like: Tensor) -> Tensor:
    """`value` as a tensor: on CUDA, torch divides by a Python number through its reciprocal, one bit off."""
    return torch.full((), value, device=like.device)
