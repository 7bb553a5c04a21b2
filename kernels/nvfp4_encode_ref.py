"""Rows to NVFP4 codes and block scales: the oracle, in plain torch, and what runs on the CPU.

The formulas are those of torchao 0.18 (`nvfp4_quantize` with a per-tensor scale), except that E4M3 scales go down to
2^-9, the smallest number of the format, and not 2^-6: small blocks keep three more bits.
"""

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from tiered.kernels.nvfp4_scale import E2M1_MAX, E4M3_MIN, block_scale
from tiered.kernels.record_layout import GROUP

_ONE = 0x3F800000  # bits of 1.0
_EXPONENT = 0x7F800000
_FIRST = -((_ONE >> 22) + (22 << 1)) % 256  # even, so that ties stay what they are


def encode_chunk(
    values: Float32[Tensor, "n width"], scale: Float32[Tensor, " n"], *, least: float = E4M3_MIN
) -> tuple[UInt8[Tensor, "n code_bytes"], UInt8[Tensor, "n groups"]]:
    """Codes (E2M1, two a byte, the even column in the low nibble) and block scales (E4M3, one for 16 columns).

    A row is padded with zeros to whole groups of 16 columns. Round to nearest, ties to even; -0 stays -0.

    Args:
        values: finite; a few rows, at least one.
        scale: FP32 scale of each row, from `nvfp4_scale`; the rows of one record share theirs.
        least: the smallest block scale.
    """
    n, width = values.shape
    values = pad(values, (0, -width % GROUP)) if width % GROUP else values.contiguous()
    # The maximum of each group: several times as fast on the CPU as a reduction over so few columns.
    amax = max_pool1d(values.abs().view(1, -1), GROUP).view(n, -1)
    row_scale = scale[:, None]
    block_scales = block_scale(amax, row_scale, least).to(torch.float8_e4m3fn)
    # Two divisions and a product, in this order, are torchao's.
    factor = 1 / row_scale / block_scales.float()
    scaled = (values.view(n, -1, GROUP) * factor[..., None]).clamp_(-E2M1_MAX, E2M1_MAX)
    return _pack(_e2m1(scaled).flatten(1)), block_scales.view(torch.uint8)


def _e2m1(values: Float32[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """4-bit codes of values within ±6, which are not left."""
    bits = values.view(torch.int32)
    # The power of two below |value|, 1 at least. A float of 2^22 times that has steps of half the power: the steps of
    # E2M1. So the addition rounds, and the lowest byte of the sum counts the steps. The bits of the power count two
    # codes for each power above 1, and `_FIRST` lets both counts together begin at 0.
    magic = (bits & _EXPONENT).clamp_(min=_ONE).add_((22 << 23) + _FIRST)
    code = values.abs().add_(magic.view(torch.float32)).view(torch.int32).add_(magic.bitwise_right_shift_(22))
    return code.sub_(bits.bitwise_right_shift_(31), alpha=8).to(torch.uint8)


def _pack(codes: UInt8[Tensor, "n columns"]) -> UInt8[Tensor, "n code_bytes"]:
    """Two 4-bit codes a byte: both nibbles are in a little-endian 16-bit word, four bits apart."""
    words = codes.view(torch.int16)
    return words.bitwise_or(words >> 4).to(torch.uint8)
