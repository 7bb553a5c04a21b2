"""Where the rows of an answer stand in a layer: who has moved most, by its value, its key, or by lot."""

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
from tiered.forward.costs import part_rows
from tiered.forward.forward import Forward
from tiered.kernels.host_values import on_device
from tiered.policies.dllm_cache.distance import Similarity, distances, farthest_first


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
        first: int,
    ) -> Int[Tensor, "batch rows"]:
        """Places in `answer`, a span, of the rows from the one that has moved most to the one that has least.

        Args:
            hidden: the layer's input of these rows.
            clocks: forwards that each sequence has taken part in, which random ranks are drawn by.
            first: place from which on rows come first among those that have moved alike.
        """
        if self.verify is Verify.RANDOM:
            lots = torch.stack([self._lots(layer, clock, answer.count) for clock in clocks])
            return farthest_first(on_device(lots, hidden.device), first)
        parts = answer.parts(part_rows(len(hidden)))
        moved = [self._moved(forward, layer, answer[part], hidden[:, part]) for part in parts]
        return farthest_first(torch.cat(moved, dim=1), first)

    def _moved(
        self, forward: Forward, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"]
    ) -> Float32[Tensor, "batch rows"]:
        model, store = forward.model, forward.store
        normed = model.attention_norm(layer, hidden)
        if self.verify is Verify.KEY:
            # Rotated as the cached ones are, by the same angles: that changes neither cosine nor distance.
            keys = model.keys(layer, normed, forward.rotary.at(rows))
            return distances(keys, rows.take(store.view(Feature.KEY, layer)), self.similarity)
        values = model.values(layer, normed)
        del normed
        moved = distances(values, rows.take(store.view(Feature.VALUE, layer)), self.similarity)
        if self.renew:
            store.write(Feature.VALUE, layer, rows, values)
        return moved

    def _lots(self, layer: int, clock: int, count: int) -> Float32[Tensor, " rows"]:
        """By seed, layer and clock alone, so that a sequence draws in a batch what it draws alone."""
        # A CPU generator takes 32 bits of its seed.
        generator = torch.Generator().manual_seed(crc32(repr((self.seed, clock, layer)).encode()))
        return torch.rand(count, generator=generator)
