"""The feature caches on the device: preallocated tensors for every feature that a policy keeps, written by rows."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.core.buffers import Buffer
from tiered.core.features import KEY_VALUE, Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.sizes import CallShape, feature_buffers
from tiered.kernels.coded_rows import CodedRows


def allocated(buffer: Buffer, device: torch.device) -> Tensor:
    """An uninitialised tensor of the declared shape and dtype."""
    return torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype), device=device)


class FeatureStore:
    """One tensor [layers, batch, heads, length, elements] for each feature; features other than K and V have one head.

    Keys are stored after RoPE, so a cached key is never rotated again. A feature that is kept for one layer of many is
    a workspace that every layer overwrites. A policy without a cache needs only that.
    """

    def __init__(self, sizes: CallShape, features: Mapping[Feature, int], device: torch.device) -> None:
        """`features`: number of layers for which each feature is kept, 1 or all (see `Policy.features`)."""
        self._first = {feature: sizes.context - sizes.columns(feature) for feature in features}
        self._tensors = {
            feature: allocated(buffer, device) for feature, buffer in feature_buffers(sizes, features).items()
        }
        self._sequences, self._kv, self._head_dim = sizes.sequences, sizes.kv, sizes.shape.head_dim

    @property
    def streamed_from(self) -> int | None:
        """The first canvas column with layers below the device; None if all layers are resident."""
        return None

    def narrow(self, sequences: int) -> None:
        """Restrict views and writes to the first `sequences`, until the next `narrow`."""
        self._sequences = sequences

    def stored(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length elements"] | CodedRows:
        """All stored rows of `feature` in `layer`, in their code: a view, valid until `keep` or until another layer of
        the feature is read or written."""
        return self._coded(feature, self._kept(feature, layer))

    def view(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length elements"]:
        """The same rows as values: a copy if they are coded."""
        stored = self.stored(feature, layer)
        return stored.values() if isinstance(stored, CodedRows) else stored

    def rows(self, feature: Feature, layer: int, rows: Rows) -> Float[Tensor, "batch heads rows elements"]:
        """The stored `rows` as values."""
        taken = self._coded(feature, rows.take(self._kept(feature, layer)))
        return taken.values() if isinstance(taken, CodedRows) else taken

    @spanned(Op.WRITE)
    def write(
        self, feature: Feature, layer: int, rows: Rows, values: Float[Tensor, "batch heads rows elements"]
    ) -> None:
        """Store `values` at `rows`. For every feature rows count columns of the canvas."""
        first, target = self._first[feature], self._target(feature, layer, rows)
        if self._kv is None or feature not in KEY_VALUE:
            rows.put(target, values, first)
        else:  # as integers: copying codes as floats may change the bits of NaN
            rows.put(target.view(torch.int32), CodedRows.of(values, self._kv).bytes.view(torch.int32), first)

    def keep(self, sequences: list[int]) -> None:
        """Keep only these sequences (ascending). The room of the others is not given back before the call ends."""
        for feature, stored in self._tensors.items():
            # In ascending order, moving one sequence at a time in place overwrites none that is still needed.
            for new, old in enumerate(sequences):
                if new != old:
                    stored[:, new].copy_(stored[:, old])
            self._tensors[feature] = stored[:, : len(sequences)]
        self._sequences = len(sequences)

    def _kept(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length stored"]:
        """Stored rows, in elements of the model's dtype."""
        stored = self._tensors[feature]
        return stored[layer if len(stored) > 1 else 0, : self._sequences]

    def _target(self, feature: Feature, layer: int, rows: Rows) -> Float[Tensor, "batch heads length stored"]:
        """The same, if the caller writes `rows` and reads nothing."""
        return self._kept(feature, layer)

    def _coded(
        self, feature: Feature, stored: Float[Tensor, "batch heads columns stored"]
    ) -> Float[Tensor, "batch heads columns elements"] | CodedRows:
        if self._kv is None or feature not in KEY_VALUE:
            return stored
        return CodedRows(stored.view(torch.uint8), self._kv, self._head_dim, stored.dtype)
