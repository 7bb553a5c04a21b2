"""Where the rows of an answer stand in a layer: which have moved most, by value, by key, or by lot (V-verify).

Source: arXiv 2506.06295, section 3.3: the rows whose values are least similar to the cached ones are recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from zlib import crc32

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.forward import Forward
from tiered.kernels.host_values import on_device

# Below this share of a row's length (cosine: 1 − 5e-7) a distance may be rounding alone. Rows that stand still are
# many, such as those of the first layer whose tokens have not changed; rounding must not choose among them, or a
# sequence would be answered otherwise in a batch than alone.
STILL = 2**-10
_TINY = 1e-30  # the length of a row of zeros


class Similarity(StrEnum):
    """What rows are compared by."""

    COSINE = "cosine"
    L2 = "l2"


class Verify(StrEnum):
    """What tells how far a row has moved."""

    VALUE = "value"
    KEY = "key"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Ranks the answer's rows of a layer.

    Attributes:
        verify, similarity: what is compared with the cache, and how.
        seed: of random ranks.
        renew: whether values that were projected to be compared replace all cached ones, as in the authors' code;
            else only rows that are recomputed replace theirs.
    """

    verify: Verify
    similarity: Similarity
    seed: int = 0
    renew: bool = False

    @spanned(Op.VERIFY)
    def ranked(
        self,
        forward: Forward,
        layer: int,
        answer: Rows,
        hidden: Float[Tensor, "batch rows width"],
        clocks: Sequence[int],
        turns: Int[Tensor, "batch rows"],
    ) -> Int[Tensor, "batch rows"]:
        """Places in `answer`, a span, of the rows from the one that has moved most to the one that has least.

        Args:
            hidden: the layer's input of these rows.
            clocks: forwards that each sequence has taken part in, which random ranks are drawn by.
            turns: all places, in the order in which rows come that have moved alike.
        """
        if self.verify is Verify.RANDOM:
            lots = torch.stack([self._lots(layer, clock, answer.count) for clock in clocks])
            return farthest_first(on_device(lots, hidden.device), turns)
        parts = forward.parts(answer.count, len(hidden))
        moved = [self._moved(forward, layer, answer[part], hidden[:, part]) for part in parts]
        return farthest_first(torch.cat(moved, dim=1), turns)

    def _moved(
        self, forward: Forward, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"]
    ) -> Float32[Tensor, "batch rows"]:
        model, store = forward.model, forward.store
        normed = model.attention_norm(layer, hidden)
        if self.verify is Verify.KEY:
            # Rotated as the cached ones are, by the same angles: that changes neither cosine nor distance.
            keys = model.keys(layer, normed, forward.rotary.at(rows))
            return distances(keys, store.rows(Feature.KEY, layer, rows), self.similarity)
        values = model.values(layer, normed)
        del normed
        moved = distances(values, store.rows(Feature.VALUE, layer, rows), self.similarity)
        if self.renew:
            store.write(Feature.VALUE, layer, rows, values)
        return moved

    def _lots(self, layer: int, clock: int, count: int) -> Float32[Tensor, " rows"]:
        """By seed, layer and clock alone, so that a sequence draws in a batch what it draws alone."""
        # A CPU generator takes 32 bits of its seed.
        generator = torch.Generator().manual_seed(crc32(repr((self.seed, clock, layer)).encode()))
        return torch.rand(count, generator=generator)


def distances(
    new: Float[Tensor, "batch heads rows elements"],
    cached: Float[Tensor, "batch heads rows elements"],
    similarity: Similarity,
) -> Float32[Tensor, "batch rows"]:
    """Distance of each row, all heads together, from the cached one; 0 where it is no more than rounding.

    By cosine it is that of the two directions, √(2 − 2·cos): in the order of falling cosine, and exact where the cosine
    itself rounds to 1.
    """
    length = _length(cached)
    if similarity is Similarity.COSINE:
        difference = (new / _length(new)).sub_(cached / length)
        length = torch.ones_like(length)
    else:
        difference = new.float() - cached
    apart = torch.linalg.vector_norm(difference, dim=(1, 3), dtype=torch.float32)
    return apart.masked_fill_(apart <= STILL * length[:, 0, :, 0], 0.0)


def farthest_first(apart: Float32[Tensor, "batch rows"], turns: Int[Tensor, "batch rows"]) -> Int[Tensor, "batch rows"]:
    """The rows by falling distance; those of equal distance in the order of `turns`, which has every row once."""
    return turns.gather(1, apart.gather(1, turns).argsort(dim=1, descending=True, stable=True))


def turns_of(starts: Int[Tensor, " batch"], rows: int, block: tuple[int, int]) -> Int[Tensor, "batch rows"]:
    """The rows of `block`, the one that is being denoised (first, and behind the last), from number `starts[b]` of it
    on and round; then those behind it, then those in front of it."""
    first, count = block[0], block[1] - block[0]
    numbers = torch.arange(rows, device=starts.device)
    return (first + torch.where(numbers < count, (numbers + starts[:, None]) % count, numbers)) % rows


def _length(rows: Float[Tensor, "batch heads rows elements"]) -> Float32[Tensor, "batch 1 rows 1"]:
    """Euclidean length of each row, all heads together; never 0."""
    return torch.linalg.vector_norm(rows, dim=(1, 3), keepdim=True, dtype=torch.float32).clamp_(min=_TINY)
