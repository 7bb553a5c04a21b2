"""NVFP4 codes and block scales to rows: the oracle, in plain torch, and what runs on the CPU."""

import functools

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from tiered.kernels.record_layout import GROUP

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNED = (*E2M1, *(-value for value in E2M1))


def decode_chunk(
    codes: UInt8[Tensor, "n code_bytes"], block_scales: UInt8[Tensor, "n groups"], scale: Float32[Tensor, " #n"]
) -> Float32[Tensor, "n padded_width"]:
    """A few rows, in whole groups: E2M1 · (scale · E4M3) in float32."""
    rows = pair_values(codes, _SIGNED).view(*block_scales.shape, GROUP)
    rows.mul_((scale[:, None] * e4m3_values(block_scales))[..., None])
    return rows.flatten(1)


def pair_values(codes: UInt8[Tensor, "n code_bytes"], values: tuple[float, ...]) -> Float32[Tensor, "n elements"]:
    """The value of each code of 4 bits, two a byte and the even column low: `values` by code."""
    return _pairs(values, codes.device).index_select(0, codes.flatten().int()).view(torch.float32).view(len(codes), -1)


def e4m3_values(codes: UInt8[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """The values of E4M3 codes."""
    return _e4m3(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


@functools.cache
def _pairs(values: tuple[float, ...], device: torch.device) -> Int64[Tensor, "256"]:
    """By code byte, its two values as the bits of two float32: one lookup serves two columns."""
    of_code = torch.tensor(values, dtype=torch.float32, device=device)
    low, high = of_code.repeat(16), of_code.repeat_interleave(16)
    return torch.stack([low, high], dim=1).view(torch.int64).flatten()


@functools.cache
def _e4m3(device: torch.device) -> Float32[Tensor, "256"]:
    """By E4M3 code, its value: on a CPU three times as fast as the conversion of torch."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
