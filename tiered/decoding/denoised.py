"""What the denoising loop leaves behind."""

from collections import Counter
from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from tiered.policies.base import PassKind


@dataclass(kw_only=True)
class Denoised:
    """Answers, and the counts of the loop.

    Attributes:
        answers: final ids of every sequence of the call.
        forwards: forwards that each sequence took part in.
        passes: forwards of the batch by kind.
        rows: rows of each sequence that every forward recomputed, on average over layers.
        step_seconds: wall time of every forward with its commit.
        block_ends: number of forwards after which each block ended.
        history: answers before the first forward and after every one that changed something; empty if not asked for.
    """

    answers: Int[Tensor, "batch answer"]
    forwards: list[int]
    passes: Counter[PassKind] = field(default_factory=Counter)
    rows: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    block_ends: list[int] = field(default_factory=list)
    history: list[Int[Tensor, "batch answer"]] = field(default_factory=list)
