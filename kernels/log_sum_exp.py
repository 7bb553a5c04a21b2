"""A log-sum-exp as two numbers, so that large scores lose no precision and parts of columns can be merged."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogSumExp:
    """log Σ exp(score) over a set of columns: the largest score, and the sum relative to it.

    One float32 number would be accurate only to 10⁻³ at a score of 10⁴, and probabilities inherit the error.

    Attributes:
        peak: the largest score; −inf for no column.
        mass: Σ exp(score − peak), from 1 to the number of columns; 0 for no column.
    """

    peak: Float32[Tensor, "*rows"]
    mass: Float32[Tensor, "*rows"]


def finite(peak: Float32[Tensor, "*rows"]) -> Float32[Tensor, "*rows"]:
    """`peak` with the least number in place of −inf, because −inf − (−inf) is NaN."""
    return peak.clamp_min(torch.finfo(peak.dtype).min)
