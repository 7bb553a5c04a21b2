"""A log-sum-exp kept in two parts, so that it loses nothing where scores are large or columns come in turns."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogSumExp:
    """log Σ exp(score) over a set of columns, as the largest score and the sum relative to it.

    One float32 number would not do: at a score of 10⁴ it is good to 10⁻³ only, and probabilities inherit the error.

    Attributes:
        peak: the largest score; −inf where there is no column.
        mass: Σ exp(score − peak), from 1 to the number of columns; 0 where there is none.
    """

    peak: Float32[Tensor, "*rows"]
    mass: Float32[Tensor, "*rows"]

    @classmethod
    def empty(cls, like: Float32[Tensor, "*rows"]) -> "LogSumExp":
        """Of no columns, in the shape and on the device of `like`."""
        return cls(torch.full_like(like, -torch.inf), torch.zeros_like(like))

    @property
    def value(self) -> Float32[Tensor, "*rows"]:
        """The log-sum-exp as one number; −inf where there is no column."""
        return self.peak + self.mass.log()

    def plus(self, scores: Float32[Tensor, "*rows columns"]) -> "LogSumExp":
        """With the columns of `scores` added; −inf is no column. Overwrites `scores`."""
        if scores.shape[-1] == 0:
            return self
        peak = torch.maximum(self.peak, scores.amax(-1))
        base = finite(peak)
        mass = scores.sub_(base[..., None]).exp_().sum(-1)
        return LogSumExp(peak, mass.add_(self.mass * (self.peak - base).exp_()))

    def merged(self) -> "LogSumExp":
        """Of all the parts that lie along the last dimension."""
        peak = self.peak.amax(-1)
        return LogSumExp(peak, (self.mass * (self.peak - finite(peak)[..., None]).exp_()).sum(-1))

    def log_probability(self, scores: Float32[Tensor, "*rows columns"]) -> Float32[Tensor, "*rows columns"]:
        """log(exp(score) / Σ exp) of columns of the set; −inf at −inf. Their probabilities are its exponential."""
        log_mass = self.mass.log().where(self.mass > 0, 0.0)
        return (scores - finite(self.peak)[..., None]).sub_(log_mass[..., None])


def finite(peak: Float32[Tensor, "*rows"]) -> Float32[Tensor, "*rows"]:
    """`peak`, or 0 where it is −inf: −inf − (−inf) is no number."""
    return peak.where(peak > -torch.inf, 0.0)
