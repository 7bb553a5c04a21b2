"""Rows in the codes of row_code.py to values: the oracle, in plain torch, used on the CPU. For the codes of weights it
is used on every device."""

import functools
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from tiered.kernels.encode_rows_ref import NOT_FINITE
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import PROJECTION_BYTES, WORD, Code, chunks

_MANTISSA_BITS = 23
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INT4 = (*range(8), *range(-8, 0))  # by code


def decode_rows(
    coded: UInt8[Tensor, "rows row_bytes"],
    code: Code,
    out: Float[Tensor, "out_rows elements"],
    numbers: Int64[Tensor, " n"] | None = None,
    places: Int64[Tensor, " n"] | None = None,
    base: RowBase | None = None,
) -> None:
    """Write the values of rows that `encode_rows` coded to `out[places]`; other rows stay unchanged.

    With a scale in E8M0 the product of a code and its scales is exact. Otherwise it is rounded to float32. The product
    with a base and the sum are rounded to float32 too, and results to the dtype of `out`. So the same bytes give the
    same rows, bit for bit, on every device and from any memory.

    Args:
        coded: bytes of rows, on the device of `out` or in pinned host memory, which the Triton kernel reads over the
            bus.
        code: code of the rows.
        out: contiguous rows.
        numbers: rows of `coded`, on its device; None for all, in order.
        places: distinct rows of `out`; None for its first n, in order.
        base: bases of residuals; None if rows are not residuals.
    """
    elements = out.shape[1]
    for part in chunks(len(coded) if numbers is None else len(numbers), elements):
        some = (coded[part] if numbers is None else coded.index_select(0, numbers[part])).to(out.device)
        rows = _DECODE[code](some, code, elements)[:, :elements]
        if base is not None:
            along = some[:, -PROJECTION_BYTES:].contiguous().view(torch.bfloat16)
            rows += base.taken(part).float().mul_(along.float())
        if places is None:
            out[part] = rows
        else:
            out.index_copy_(0, places[part], rows.to(out.dtype))


def decode_groups(
    codes: UInt8[Tensor, "n code_bytes"], block_scales: UInt8[Tensor, "n groups"], scale: Float32[Tensor, " #n"]
) -> Float32[Tensor, "n padded_width"]:
    """A few rows of nvfp4, in whole groups: code · (scale · scale of the group)."""
    rows = _pair_values(codes, (*E2M1, *(-value for value in E2M1))).unflatten(1, (block_scales.shape[1], -1))
    return rows.mul_((scale[:, None] * _e4m3_values(block_scales))[..., None]).flatten(1)


def _fp8(rows: UInt8[Tensor, "n row_bytes"], code: Code, elements: int) -> Float32[Tensor, "n elements"]:
    return _e4m3_values(rows[:, :elements]).mul_(_row_scales(rows, code, elements)[:, None])


def _int8(rows: UInt8[Tensor, "n row_bytes"], code: Code, elements: int) -> Float32[Tensor, "n elements"]:
    return rows[:, :elements].view(torch.int8).float().mul_(_row_scales(rows, code, elements)[:, None])


def _int4(rows: UInt8[Tensor, "n row_bytes"], code: Code, elements: int) -> Float32[Tensor, "n padded_elements"]:
    codes, block_scales = _parts(rows, code, elements)
    scales = block_scales.contiguous().view(torch.bfloat16)
    return _pair_values(codes, _INT4).unflatten(1, (-1, code.group)).mul_(scales[..., None]).flatten(1)


def _nvfp4(rows: UInt8[Tensor, "n row_bytes"], code: Code, elements: int) -> Float32[Tensor, "n padded_elements"]:
    return decode_groups(*_parts(rows, code, elements), _row_scales(rows, code, elements))


# By name: codes of one name have the same elements, whatever the scale of their rows.
_DECODE: Mapping[str, Callable[[Tensor, Code, int], Tensor]] = {
    "fp8": _fp8,
    "nvfp4": _nvfp4,
    "int8": _int8,
    "int4": _int4,
}


def _parts(
    rows: UInt8[Tensor, "n row_bytes"], code: Code, elements: int
) -> tuple[UInt8[Tensor, "n code_bytes"], UInt8[Tensor, "n scale_bytes"]]:
    begin = code.code_bytes(elements)
    return rows[:, :begin], rows[:, begin : begin + code.groups(elements) * code.group_scale]


def _row_scales(rows: UInt8[Tensor, "n row_bytes"], code: Code, elements: int) -> Float32[Tensor, " n"]:
    begin = code.scale_at(elements)
    if code.row_scale == WORD:
        return rows[:, begin : begin + WORD].contiguous().view(torch.float32).squeeze(1)
    exponents = rows[:, begin]
    scale = (exponents.int() << _MANTISSA_BITS).view(torch.float32)
    return scale.masked_fill_(exponents == NOT_FINITE, torch.nan)


def _pair_values(codes: UInt8[Tensor, "n code_bytes"], values: tuple[float, ...]) -> Float32[Tensor, "n elements"]:
    """The value of each 4-bit code, two a byte with the even column low; `values` by code."""
    return _pairs(values, codes.device).index_select(0, codes.flatten().int()).view(torch.float32).view(len(codes), -1)


def _e4m3_values(codes: UInt8[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    return _e4m3(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


@functools.cache
def _pairs(values: tuple[float, ...], device: torch.device) -> Int64[Tensor, "256"]:
    """By code byte, its two values as the bits of two float32, so one lookup serves two columns."""
    of_code = torch.tensor(values, dtype=torch.float32, device=device)
    low, high = of_code.repeat(16), of_code.repeat_interleave(16)
    return torch.stack([low, high], dim=1).view(torch.int64).flatten()


@functools.cache
def _e4m3(device: torch.device) -> Float32[Tensor, "256"]:
    """By E4M3 code, its value: on a CPU three times as fast as torch's conversion."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
