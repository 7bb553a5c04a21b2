"""The FP32 scale of an NVFP4 record, and the guard before it: plain torch, for every device."""

import math

import torch
from jaxtyping import Float, Float32
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the smallest positive number: a block of zeros has this scale
E4M3_NORMAL = 2.0**-6  # the smallest of full precision

# The least FP32 scale for which neither 1 / scale / E4M3_MIN overflows nor the smallest decoded value, half of
# scale * E4M3_MIN, is subnormal, so that devices that flush subnormals agree with those that do not.
SCALE_MIN = 2.0**-116


def nvfp4_scale(amax: Float32[Tensor, "*records"]) -> Float32[Tensor, "*records"]:
    """The FP32 scale of records whose largest magnitudes are `amax`.

    amax / (6 · 448), so that the largest block gets the largest E4M3 scale; 1 for a record of zeros, where torchao
    divides by zero. Below 3e-32, SCALE_MIN: such a record loses precision gradually. Not finite where amax is not.
    """
    return scale_to(E2M1_MAX * E4M3_MAX, amax)


def scale_to(most: float, amax: Float32[Tensor, "*records"]) -> Float32[Tensor, "*records"]:
    """The scale that brings `amax` to `most`: SCALE_MIN and more; 1 for zeros; not finite where amax is not."""
    return (amax / _divisor(most, amax)).clamp(min=SCALE_MIN).masked_fill(amax == 0, 1.0)


def block_scale(
    block_amax: Float32[Tensor, "n groups"], scale: Float32[Tensor, "n 1"], least: float = E4M3_MIN
) -> Float32[Tensor, "n groups"]:
    """What the E4M3 scale of a block is rounded from, within the range of E4M3, from `least` on."""
    return (block_amax / _divisor(E2M1_MAX, block_amax) / scale).clamp(least, E4M3_MAX)


def require_finite(values: Float[Tensor, "..."], what: str) -> None:
    """Raise `ValueError` if any value is infinite or NaN. Reads every value once and, on a GPU, waits for the answer:
    there, once a layer at most."""
    if values.numel() and not all(map(math.isfinite, torch.stack(torch.aminmax(values)).tolist())):
        raise ValueError(f"{what} hold values that are infinite or NaN; NVFP4 has neither, finite ones are allowed")


def _divisor(value: float, like: Tensor) -> Tensor:
    """`value` beside `like`: on CUDA, torch divides by a Python number through its reciprocal, one bit off."""
    return torch.full((), value, device=like.device)
