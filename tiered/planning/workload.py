"""Books: one call as far as bytes go, and how far it can grow under a cap."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tiered.features import Account, Feature
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.planning.costs import call_bytes, weight_bytes

# Where a search for the largest size ends; no device holds what costs nothing per row and still needs more.
_LARGEST_SIZE = 2**40


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_width * BYTES_PER_ELEMENT[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one call asks of the device.

    Attributes:
        shape: sizes of the model.
        features: layers for which the policy keeps each feature.
        batch: sequences asked for; `guidance` runs twice as many.
        context: positions of the canvas, prompt and answer together.
        block_length: positions of a block.
        dtype: of weights and activations, a key of `BYTES_PER_ELEMENT`.
        sampled: whether tokens are drawn at a temperature above 0.
    """

    shape: ModelShape
    features: Mapping[Feature, int]
    batch: int
    context: int
    block_length: int
    dtype: str
    guidance: bool = False
    sampled: bool = False

    @property
    def sequences(self) -> int:
        """Sequences that go through a forward together."""
        return self.batch * (2 if self.guidance else 1)

    def accounts(self) -> dict[Account, int]:
        """Bytes on the device, weights included."""
        return {Account.WEIGHTS: weight_bytes(self.shape, self.dtype)} | call_bytes(
            self.shape,
            self.features,
            batch=self.sequences,
            context=self.context,
            block_length=self.block_length,
            dtype=self.dtype,
            sampled=self.sampled,
        )

    def total(self) -> int:
        """Bytes on the device in all."""
        return sum(self.accounts().values())

    def largest(self, size: Literal["batch", "context"], cap: int, *, multiple: int = 1) -> int:
        """The largest `size`, in multiples of `multiple`, that keeps the total within `cap` bytes; 0 where none does.

        Everything else stays as it is. A bisection, since the total grows with either size; only where more sequences
        round the rows of a part down it dips, and may stop there. What comes back has been counted, so it fits.
        """
        sizes = range(multiple, _LARGEST_SIZE, multiple)
        return multiple * bisect_right(sizes, cap, key=lambda value: replace(self, **{size: value}).total())
