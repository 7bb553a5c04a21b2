"""Logits that are never whole: a part of the vocabulary at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float, Float32
from torch import Tensor

from tiered.models import shape
from tiered.models.base import DiffusionModel, without_norm_marked


@dataclass(frozen=True, slots=True)
class LogitTiles:
    """The logits of the last layer's output `hidden`, made when they are asked for."""

    model: DiffusionModel
    hidden: Float[Tensor, "batch rows width"]

    @classmethod
    def of(cls, model: DiffusionModel, hidden: Float[Tensor, "batch rows width"]) -> "LogitTiles":
        """As `head`: logits are NaN at rows without a finite norm. Overwrites `hidden`."""
        return cls(model, without_norm_marked(hidden))

    @property
    def vocab_size(self) -> int:
        return self.model.shape.vocab_size

    def __iter__(self) -> Iterator[tuple[slice, Float32[Tensor, "batch rows tile"]]]:
        """Each tile's tokens, and their logits, which are scratch space."""
        for first in range(0, self.vocab_size, shape.VOCABULARY_TILE):
            tokens = slice(first, min(first + shape.VOCABULARY_TILE, self.vocab_size))
            yield tokens, self.model.logits(self.hidden, tokens)
