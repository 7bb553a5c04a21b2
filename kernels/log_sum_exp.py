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
        peak: the largest score; −inf where there is no column. After `minus` it may be that of a column taken out.
        mass: Σ exp(score − peak), from 1 to the number of columns, after `minus` from above 0; 0 where there is none.
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

    def minus(self, part: "LogSumExp") -> "LogSumExp":
        """Without the columns of `part`, which must be some of those in the set, at the scores that they were added at.

        What remains is off by the rounding of scores times the mass of `part`: about 10⁻⁶ of it at scores of 10. So
        where `part` holds nearly all, the remainder is noise: a set that can be summed without `part` should be. More
        precise arithmetic would not help, since the scores themselves are rounded.
        """
        removed = part.mass * (part.peak - finite(self.peak)).exp_()
        mass = (self.mass - removed).clamp_min_(0)
        return LogSumExp(self.peak.where(mass > 0, -torch.inf), mass)

    def union(self, other: "LogSumExp") -> "LogSumExp":
        """With the columns of `other` added; no column may be in both."""
        both = [self.peak, other.peak], [self.mass, other.mass]
        return LogSumExp(*(torch.stack(pair, dim=-1) for pair in both)).merged()

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
