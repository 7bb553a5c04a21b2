"""Rows to NVFP4 codes and block scales: the oracle, in plain torch.

The formulas are those of torchao 0.18 (`nvfp4_quantize` with a per-tensor scale), except that E4M3 scales go down to
2^-9, the smallest number of the format, and not 2^-6: small blocks keep three more bits.
"""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn.functional import pad

from tiered.kernels.nvfp4_scale import E2M1_MAX, block_scale, require_finite
from tiered.kernels.record_layout import CODE_BYTES, GROUP

CHUNK_ROWS = 64  # their temporaries stay in the cache

_ONE = 0x3F800000  # bits of 1.0
_EXPONENT = 0x7F800000


def nvfp4_encode(
    values: Float[Tensor, "n width"], scale: Float32[Tensor, " n"]
) -> tuple[UInt8[Tensor, "n code_bytes"], UInt8[Tensor, "n groups"]]:
    """Codes (E2M1, two a byte, the even column in the low nibble) and block scales (E4M3, one for 16 columns).

    A row is padded with zeros to whole groups of 16 columns. Round to nearest, ties to even; -0 stays -0.

    Args:
        values: float32 or bfloat16.
        scale: FP32 scale of each row, from `nvfp4_scale`; the rows of one record share theirs.

    Raises:
        ValueError: values that are not finite, or as many scales as rows are not given.
    """
    if scale.shape != values.shape[:1]:
        raise ValueError(f"scale {tuple(scale.shape)} does not fit values {tuple(values.shape)}: one a row is allowed")
    require_finite(values, "values")
    n, width = values.shape
    groups = -(-width // GROUP)
    codes = torch.empty(n, groups * CODE_BYTES, dtype=torch.uint8, device=values.device)
    block_scales = torch.empty(n, groups, dtype=torch.uint8, device=values.device)
    for start in range(0, n, CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        chunk = pad(values[part].float().contiguous(), (0, groups * GROUP - width)).view(-1, groups, GROUP)
        row_scale = scale[part, None]
        scales = block_scale(chunk.abs().amax(-1), row_scale).to(torch.float8_e4m3fn)
        block_scales[part] = scales.view(torch.uint8)
        # Two divisions and a product, in this order, are torchao's.
        scaled = (chunk * (1 / row_scale / scales.float())[..., None]).clamp_(-E2M1_MAX, E2M1_MAX)
        codes[part] = _pack(_e2m1(scaled).flatten(1))
    return codes, block_scales


def _e2m1(values: Float32[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """4-bit codes of values within ±6."""
    bits = values.view(torch.int32)
    # The power of two below |value|, 1 at least. A float of 2^22 times that has steps of half the power: the steps of
    # E2M1. So the addition rounds, and what it adds to the bits counts the steps.
    power = (bits & _EXPONENT).clamp_(min=_ONE)
    magic = power + (22 << 23)
    steps = (values.abs() + magic.view(torch.float32)).view(torch.int32).sub_(magic)
    code = steps.add_(power.sub_(_ONE).bitwise_right_shift_(22))  # two codes for each power above 1
    return code.bitwise_or_(bits.bitwise_right_shift(28).bitwise_and_(8)).to(torch.uint8)


def _pack(codes: UInt8[Tensor, "n columns"]) -> UInt8[Tensor, "n code_bytes"]:
    """Two 4-bit codes a byte: both nibbles are in a little-endian 16-bit word, four bits apart."""
    words = codes.view(torch.int16)
    return words.bitwise_or(words >> 4).to(torch.uint8)
