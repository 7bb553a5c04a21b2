"""The device tier's caches: preallocated tensors for every feature that a policy keeps, written by rows."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.core.features import ANSWER_ONLY, KEY_VALUE, Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.models.shape import ModelShape
from tiered.offload.codec_bytes import Codec
from tiered.offload.codecs import CODECS, RowScaledCodec


class FeatureStore:
    """One tensor [layers, batch, heads, length, elements] for each feature; `HIDDEN` and its like have one head.

    Keys are stored after RoPE, so that a cached key is never rotated again. A feature kept for a single layer of many
    is a workspace that every layer overwrites in turn: that is all a policy without a cache needs.
    """

    def __init__(
        self,
        shape: ModelShape,
        features: Mapping[Feature, int],
        *,
        batch: int,
        length: int,
        answer_start: int = 0,
        dtype: torch.dtype,
        device: torch.device,
        kv: Codec = Codec.RAW,
    ) -> None:
        """`features`: layers for which each feature is kept, 1 or all (see `Policy.features`); those that are
        `ANSWER_ONLY` are kept from column `answer_start` on. `kv`: what is written of keys and values is what comes
        back from this codec, wherever it is kept."""
        self._first = {feature: answer_start if feature in ANSWER_ONLY else 0 for feature in features}
        self._tensors: dict[Feature, Tensor] = {
            feature: torch.empty(
                layers, batch, *_heads_elements(shape, feature, length - self._first[feature]),
                dtype=dtype, device=device,
            )
            for feature, layers in features.items()
        }  # fmt: skip
        self._sequences, self._kv = batch, kv

    @property
    def streamed_from(self) -> int | None:
        """The first canvas column of which some layers are kept below the device; None: all are resident."""
        return None

    def narrow(self, sequences: int) -> None:
        """Let views and writes be of the first `sequences` alone, until the next `narrow`."""
        self._sequences = sequences

    def view(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length elements"]:
        """Everything that is stored of `feature` for `layer`: a view, valid until `keep` or until another layer of the
        feature is viewed or written."""
        stored = self._tensors[feature]
        return stored[layer if len(stored) > 1 else 0, : self._sequences]

    @spanned(Op.WRITE)
    def write(
        self, feature: Feature, layer: int, rows: Rows, values: Float[Tensor, "batch heads rows elements"]
    ) -> None:
        """Store `values` at `rows`, which count columns of the canvas for every feature."""
        first = self._first[feature]
        (rows.moved(-first) if first else rows).put(self.view(feature, layer), self.rounded(feature, values))

    def rounded(
        self, feature: Feature, values: Float[Tensor, "batch heads rows elements"]
    ) -> Float[Tensor, "batch heads rows elements"]:
        """`values` as they are kept."""
        codec = CODECS[self._kv]
        return codec.rounded(values) if isinstance(codec, RowScaledCodec) and feature in KEY_VALUE else values

    def keep(self, sequences: list[int]) -> None:
        """Go on with these sequences alone (ascending); the others' room is not given back before the call ends."""
        for feature, stored in self._tensors.items():
            # Ascending order makes it safe to move in place, one sequence at a time, without a second copy.
            for new, old in enumerate(sequences):
                if new != old:
                    stored[:, new].copy_(stored[:, old])
            self._tensors[feature] = stored[:, : len(sequences)]
        self._sequences = len(sequences)


def _heads_elements(shape: ModelShape, feature: Feature, length: int) -> tuple[int, int, int]:
    if feature in (Feature.KEY, Feature.VALUE):
        return shape.kv_heads, length, shape.head_dim
    return 1, length, shape.width
