"""A log-sum-exp kept in two parts, so that it loses nothing where scores are large or columns come in turns."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int
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

    @classmethod
    def by_part(
        cls,
        scores: Float32[Tensor, "batch heads clusters columns"],
        part: Int[Tensor, "batch columns"],
        member: Bool[Tensor, "batch columns parts"],
    ) -> "LogSumExp":
        """Of each part's columns, with the parts along the last dimension.

        Args:
            scores: −inf is no column. Overwritten.
            part: of each column; −1 is no column, and has no score.
            member: the same as a table (`members`).
        """
        parts = member.shape[2]
        none = scores.new_full((*scores.shape[:3], parts), -torch.inf)
        if parts == 1:
            peak = torch.maximum(none, scores.amax(3, keepdim=True)) if scores.shape[3] else none
            base = finite(peak)
        else:
            index = part.clamp_min(0)[:, None, None].expand_as(scores)
            peak = none.scatter_reduce_(3, index, scores, "amax")
            base = finite(peak).gather(3, index)
        weights = scores.sub_(base).exp_()
        # A product with ones and zeros: a scattered sum would add in another order each time on CUDA.
        return cls(peak, (weights.flatten(1, 2) @ member.float()).view_as(peak))

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

    def minus(self, part: "LogSumExp", whole: Bool[Tensor, "*rows"] | None = None) -> "LogSumExp":
        """Without the columns of `part`, which must be some of those in the set, at the scores that they were added at.

        What remains is off by the rounding of scores times the mass of `part`: about 10⁻⁶ of it at scores of 10. So
        where `part` holds nearly all, the remainder is noise: a set that can be summed without `part` should be. More
        precise arithmetic would not help, since the scores themselves are rounded.

        Args:
            whole: True where `part` has every column of the set: nothing remains, and no noise.
        """
        removed = (part.peak - finite(self.peak)).exp_().mul_(part.mass)
        mass = (self.mass - removed).clamp_min_(0)
        mass = mass if whole is None else mass.masked_fill_(whole, 0)
        return LogSumExp(self.peak.where(mass > 0, -torch.inf), mass)

    def union(self, other: "LogSumExp") -> "LogSumExp":
        """With the columns of `other` added; no column may be in both."""
        peak = torch.maximum(self.peak, other.peak)
        ours, theirs = ((one.peak - finite(peak)).exp_().mul_(one.mass) for one in (self, other))
        return LogSumExp(peak, ours.add_(theirs))

    def merged(self) -> "LogSumExp":
        """Of all the parts that lie along the last dimension."""
        peak = self.peak.amax(-1)
        return LogSumExp(peak, (self.mass * (self.peak - finite(peak)[..., None]).exp_()).sum(-1))

    def log_probability(self, scores: Float32[Tensor, "*rows columns"]) -> Float32[Tensor, "*rows columns"]:
        """log(exp(score) / Σ exp) of columns of the set; −inf at −inf. Their probabilities are its exponential."""
        log_mass = self.mass.log().where(self.mass > 0, 0.0)
        return (scores - finite(self.peak)[..., None]).sub_(log_mass[..., None])


def members(part: Int[Tensor, "batch columns"], parts: int) -> Bool[Tensor, "batch columns parts"]:
    """Which of `parts` each column belongs to: one, or none at −1. Summed over columns, it is the size of each part."""
    return part[..., None] == torch.arange(parts, device=part.device)


def finite(peak: Float32[Tensor, "*rows"]) -> Float32[Tensor, "*rows"]:
    """`peak`, or the least number where it is −inf: −inf − (−inf) is no number."""
    return peak.clamp_min(torch.finfo(peak.dtype).min)
