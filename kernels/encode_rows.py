"""Rows, or their residuals against a base, to codes in Triton: each row is read once, and stays in registers."""

import triton
import triton.language as tl
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.encode_rows_ref import BIAS, E2M1_MAX, E4M3_MAX, E4M3_NORMAL, LEAST, LEAST_OF_TWO, NOT_FINITE
from tiered.kernels.launch import RowTile, launch, row_tile
from tiered.kernels.row_base import RowBase, base_arguments
from tiered.kernels.row_bits import bf16_bits, bf16_values, e4m3_codes, encode_groups, magnitude_bits
from tiered.kernels.row_code import WORD, Code, RowLayout

TILE_ELEMENTS = 4096  # elements of a program, or those of one row if it has more
THREAD_ELEMENTS = 16
_BIAS, _LEAST, _LEAST_OF_TWO = tl.constexpr(BIAS), tl.constexpr(LEAST), tl.constexpr(LEAST_OF_TWO)
_E2M1_MAX, _E4M3_MAX, _E4M3_NORMAL = tl.constexpr(E2M1_MAX), tl.constexpr(E4M3_MAX), tl.constexpr(E4M3_NORMAL)
_WORD, _NOT_FINITE = tl.constexpr(WORD), tl.constexpr(NOT_FINITE - BIAS)
_INFINITY = tl.constexpr(0x7F800000)  # its bits


@triton.jit
def _rounded_most(most):
    """Sixteenths and exponent of float32 from 0 on, as in encode_rows_ref.py. Subnormals count as the smallest normal
    number."""
    bits = most.to(tl.int32, bitcast=True)
    sixteenths = 8 + (((bits & 0x7FFFFF) + 0x7FFFF + ((bits >> 20) & 1)) >> 20)
    return tl.where(bits == 0, 0, sixteenths), tl.where(bits == 0, 0, (bits >> 23) - 126)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + _BIAS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _marked(exponent, most):
    return tl.where(most.to(tl.int32, bitcast=True) >= _INFINITY, _NOT_FINITE, exponent)


# Arguments that vary between calls are not specialised: the row numbers are slices of one table.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["numbers", "of_row"])
def _encode_rows(
    values, row_stride, coded, numbers, bases, base_stride, of_row, count, ROW: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    there = row < count
    element = tl.arange(0, TILE.elements)
    own = there[:, None] & (element < ROW.elements)[None, :]
    value = tl.load(values + (row * row_stride)[:, None] + element[None, :], own, other=0.0).to(tl.float32)
    target = row
    if numbers is not None:
        target = tl.load(numbers + row, there, other=0)
    # The hint that rows are whole words lets the compiler store several codes at once.
    start = coded + tl.multiple_of(target * ROW.row_bytes, [4])
    end: tl.constexpr = ROW.row_bytes if bases is None else ROW.row_bytes - 2
    if bases is not None:
        base_row = bases + tl.load(of_row + row, there, other=0) * base_stride
        base = tl.load(base_row[:, None] + element[None, :], own, other=0.0).to(tl.float32)
        # float64, as in the reference.
        above = tl.sum(value.to(tl.float64) * base.to(tl.float64), 1)
        below = tl.sum(base.to(tl.float64) * base.to(tl.float64), 1)
        along = bf16_bits((above / below).to(tl.float32))
        tl.store((start + end).to(tl.pointer_type(tl.uint16)), along, there)
        value -= bf16_values(along)[:, None] * base
    most = tl.max(magnitude_bits(value), 1).to(tl.float32, bitcast=True)
    if ROW.fp8:
        sixteenths, exponent = _rounded_most(most)
        exponent = tl.maximum(exponent - 9 + (sixteenths > 14).to(tl.int32), _LEAST)
        scaled = tl.minimum(tl.abs(value) * _power_of_two(-exponent)[:, None], _E4M3_MAX)
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        tl.store(start[:, None] + element[None, :], (e4m3_codes(scaled) | sign).to(tl.uint8), own)
    else:
        groups: tl.constexpr = TILE.elements // 16
        sixteenths, exponent = _rounded_most(tl.div_rn(most, _E2M1_MAX))
        exponent = tl.maximum(exponent - 8 + (sixteenths == 16).to(tl.int32), _LEAST_OF_TWO)
        in_groups = tl.reshape(value, (TILE.rows, groups, 16))
        pairs, block_scales = encode_groups(in_groups, _power_of_two(exponent), _E4M3_NORMAL, TILE.rows, groups)
        group = tl.arange(0, groups)
        filled = there[:, None] & (group < ROW.code_bytes // 8)[None, :]
        byte = (group * 8)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(start[:, None, None] + byte[None, :, :], pairs, filled[:, :, None])
        tl.store(start[:, None] + (ROW.code_bytes + group)[None, :], block_scales, filled)
    last = tl.arange(0, _WORD)
    scale = tl.where((last == 0)[None, :], (_marked(exponent, most) + _BIAS)[:, None], 0).to(tl.uint8)
    at = ROW.scale_at + last
    tl.store(start[:, None] + at[None, :], scale, there[:, None] & (at < end)[None, :])


def encode_rows(
    values: Float[Tensor, "n elements"],
    code: Code,
    out: UInt8[Tensor, "rows row_bytes"],
    numbers: Int64[Tensor, " n"] | None = None,
    base: RowBase | None = None,
) -> None:
    """As in encode_rows_ref.py, for the codes of `RowCode`."""
    count, elements = values.shape
    if not count:
        return
    values = values if values.stride(1) == 1 else values.contiguous()
    tile, row = tile_of(elements), RowLayout.of(code, elements, residual=base is not None)
    arguments = values, values.stride(0), out, numbers, *base_arguments(base), count
    options = {"num_warps": warps_of(tile), "enable_fp_fusion": False}
    launch(_encode_rows, (-(-count // tile.rows),), *arguments, ROW=row, TILE=tile, **options, on=values)


def tile_of(elements: int) -> RowTile:
    return row_tile(max(16, elements), TILE_ELEMENTS)


def warps_of(tile: RowTile) -> int:
    """Warps of a program, so that a thread has `THREAD_ELEMENTS`, up to 16 warps."""
    return min(16, max(4, tile.rows * tile.elements // (32 * THREAD_ELEMENTS)))
