"""Logits that are never whole: of a part of the vocabulary, or of some rows, at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.models.base import DiffusionModel, without_norm_marked

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class LogitTiles:
    """The logits of the last layer's output `hidden`, made when they are asked for.

    Attributes:
        scale: scale of classifier-free guidance. The second half of the sequences are then those with masked prompts,
            and logits are of the first half. None without guidance.
    """

    model: DiffusionModel
    hidden: Float[Tensor, "sequences rows width"]
    scale: float | None = None

    @classmethod
    def of(cls, model: DiffusionModel, hidden: Float[Tensor, "sequences rows width"]) -> "LogitTiles":
        """As `head`: logits are NaN at rows without a finite norm. Overwrites `hidden`."""
        return cls(model, without_norm_marked(hidden))

    @property
    def vocab_size(self) -> int:
        return self.model.shape.vocab_size

    @property
    def batch(self) -> int:
        """Sequences that have logits."""
        return len(self.hidden) if self.scale is None else len(self.hidden) // 2

    def by_tokens(self, count: int) -> Iterator[tuple[slice, Float32[Tensor, "batch rows tile"]]]:
        """The logits of `count` tokens at a time, which are scratch space."""
        for first in range(0, self.vocab_size, count):
            tokens = slice(first, min(first + count, self.vocab_size))
            yield tokens, self._made(self.hidden, tokens)

    def of_rows(self, sequence: int, rows: Int[Tensor, " rows"]) -> Float32[Tensor, "1 rows vocab"]:
        """The logits of these rows of a sequence; scratch space."""
        return self._made(self.hidden[sequence :: self.batch, rows], _ALL)

    def _made(
        self, hidden: Float[Tensor, "sequences rows width"], tokens: slice
    ) -> Float32[Tensor, "batch rows tokens"]:
        logits = self.model.logits(hidden, tokens)
        return logits if self.scale is None else with_guidance(logits.chunk(2), self.scale)


def with_guidance(
    both: Sequence[Float[Tensor, "batch rows tokens"]], scale: float
) -> Float[Tensor, "batch rows tokens"]:
    """un + (scale + 1) · (cond − un), LLaDA's classifier-free guidance, of `both` logits, cond and un; in place."""
    conditional, unconditional = both
    # In the official order: (scale + 1) · cond − scale · un would round differently.
    return conditional.sub_(unconditional).mul_(scale + 1).add_(unconditional)
