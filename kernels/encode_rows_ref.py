"""Rows to the codes of row_code.py: the oracle, in plain torch, and what runs on the CPU."""

import torch
from jaxtyping import Float, Float32, Int32, UInt8
from torch import Tensor

from tiered.kernels.nvfp4_encode_ref import encode_chunk
from tiered.kernels.nvfp4_scale import E2M1_MAX, E4M3_MAX, E4M3_NORMAL

BIAS, LEAST = 127, -126  # of the exponents of scales, which are float32's: the least is that of its normal numbers
LEAST_OF_TWO = -116  # of the scale of a row whose groups have scales too


def encode_rows(values: Float[Tensor, "*rows elements"], code: str, row_bytes: int) -> UInt8[Tensor, "*rows row_bytes"]:
    """Rows as they come, coded.

    Args:
        values: finite.
        code: "fp8" or "nvfp4".
        row_bytes: of a row, filled up with zeros.
    """
    rows = values.flatten(0, -2).float()
    out = torch.zeros(len(rows), row_bytes, dtype=torch.uint8, device=rows.device)
    codes, exponents = (_fp8 if code == "fp8" else _nvfp4)(rows)
    out[:, : codes.shape[1]] = codes
    out[:, codes.shape[1]] = (exponents.squeeze(1) + BIAS).to(torch.uint8)
    return out.view(*values.shape[:-1], row_bytes)


def _fp8(values: Float32[Tensor, "n width"]) -> tuple[UInt8[Tensor, "n width"], Int32[Tensor, "n 1"]]:
    """E4M3. The largest of a row is rounded first, so that a scale is the same for rounded rows: it is the least that
    brings it to 448 or below, which is 14/16 of 2⁹."""
    sixteenths, exponent = _rounded_most(values)
    exponents = (exponent - 9 + (sixteenths > 14).int()).clamp_min(LEAST)
    # What is above the largest number would be rounded to it, or to none: that differs by version.
    scaled = torch.ldexp(values, -exponents).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), exponents


def _nvfp4(values: Float32[Tensor, "n width"]) -> tuple[UInt8[Tensor, "n code_bytes"], Int32[Tensor, "n 1"]]:
    """E2M1 with an E4M3 scale for 16 columns, all of them normal numbers: the largest of a row is 128 to 256. Codes
    first, then block scales."""
    sixteenths, exponent = _rounded_most(values / torch.full((), E2M1_MAX, device=values.device))
    # Below, 1 over the product of both scales would overflow.
    exponents = (exponent - 8 + (sixteenths == 16).int()).clamp_min(LEAST_OF_TWO)
    scale = torch.ldexp(torch.ones_like(values[:, :1]), exponents)
    return torch.cat(encode_chunk(values, scale.squeeze(1), least=E4M3_NORMAL), dim=1), exponents


def _rounded_most(values: Float32[Tensor, "n width"]) -> tuple[Float32[Tensor, "n 1"], Int32[Tensor, "n 1"]]:
    """The largest magnitude of each row, rounded to four bits: sixteenths of a power of two, 8 to 16, and which."""
    mantissa, exponent = values.abs().amax(dim=1, keepdim=True).frexp()
    return (16 * mantissa).round(), exponent
