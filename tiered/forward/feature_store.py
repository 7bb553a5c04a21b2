"""The feature caches on the device: preallocated tensors for every feature that a policy keeps, written by rows."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

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
    """One tensor [layers, batch, heads, length, elements] for each feature and kind of layer (`ModelShape.kinds`);
    features other than K and V have one head.

    Keys are stored after RoPE, so a cached key is never rotated again. Keys that are made of values have no elements
    here (`ModelShape.keys_of_values`). A feature that is kept for one layer of many is
    a workspace that every layer overwrites. A policy without a cache needs only that.

    Attributes:
        code: the code of keys and values; None for none.
        streamed_from: the first canvas column with layers below the device; None if all layers are resident.
    """

    def __init__(
        self,
        sizes: CallShape,
        features: Mapping[Feature, int],
        device: torch.device,
        most_rows: int | None = None,
        below: Mapping[Feature, Collection[int]] = MappingProxyType({}),
    ) -> None:
        """`features`: number of layers for which each feature is kept, 1 or all (see `Policy.features`). `most_rows`,
        `below`: as in `feature_buffers`."""
        self._first = {feature: sizes.context - sizes.columns(feature) for feature in features}
        self._tensors = {
            feature: [allocated(buffer, device) for buffer in buffers]
            for feature, buffers in feature_buffers(sizes, features, most_rows, below).items()
        }
        self._sequences, self.code = sizes.sequences, sizes.kv
        self.streamed_from: int | None = None
        self._kinds = sizes.shape.kinds
        self._begins = [0] * len(self._kinds)  # the first column kept in layers of each kind
        self._kind = {layer: number for number, kind in enumerate(self._kinds) for layer in kind.layers}
        self._places = {
            (feature, layer): place
            for feature in features
            for kind in self._kinds
            for place, layer in enumerate(layer for layer in kind.layers if layer not in below.get(feature, ()))
        }

    def memory(self, feature: Feature) -> Float[Tensor, "layers sequences heads length stored"] | None:
        """Stored rows of all layers, in elements of the model's dtype. None if layers are of several kinds, share a
        workspace, or are below the device."""
        first, *others = self._tensors[feature]
        every = len(first) == sum(len(kind.layers) for kind in self._kinds)
        alone = every and not others and not self._first[feature]
        return first[:, : self._sequences] if alone else None

    def narrow(self, sequences: int) -> None:
        """Restrict views and writes to the first `sequences`, until the next `narrow`."""
        self._sequences = sequences

    def kept(self, layer: int) -> slice:
        """The canvas columns whose keys and values `layer` has room for."""
        kind = self._kind[layer]
        begin = self._begins[kind]
        return slice(begin, begin + self._tensors[Feature.KEY][kind].shape[3])

    def move_windows(self, rows: Rows) -> None:
        """Make room for keys and values of `rows`, a span, in layers with a window, and forget columns that neither
        they nor later ones read. Rows in front of all that is kept begin anew."""
        for number, kind in enumerate(self._kinds):
            begin, room = self._begins[number], self._tensors[Feature.KEY][number].shape[3]
            first, stop = rows.within.start, rows.within.stop
            if kind.window is None or (begin <= first and stop <= begin + room):
                continue
            self._begins[number] = max(0, first - kind.window + 1)
            if first < begin:
                continue
            moved = self._begins[number] - begin
            left = min(room - moved, kind.window - 1)
            for feature in KEY_VALUE:
                kept = self._tensors[feature][number]
                # Pieces that do not overlap where they go.
                for start in range(0, left, moved):
                    count = min(moved, left - start)
                    kept[:, :, :, start : start + count] = kept[:, :, :, start + moved : start + moved + count]

    def stored(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length elements"] | CodedRows:
        """All stored rows of `feature` in `layer`, in their code: a view, valid until `keep` or until another layer of
        the feature is read or written."""
        return self._coded(feature, layer, self._kept(feature, layer))

    def view(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length elements"]:
        """The same rows as values: a copy if they are coded."""
        stored = self.stored(feature, layer)
        return stored.values() if isinstance(stored, CodedRows) else stored

    def rows(self, feature: Feature, layer: int, rows: Rows) -> Float[Tensor, "batch heads rows elements"]:
        """The stored `rows` as values."""
        taken = self._coded(feature, layer, rows.take(self._kept(feature, layer)))
        return taken.values() if isinstance(taken, CodedRows) else taken

    @spanned(Op.WRITE)
    def write(
        self, feature: Feature, layer: int, rows: Rows, values: Float[Tensor, "batch heads rows elements"]
    ) -> None:
        """Store `values` at `rows`. For every feature rows count columns of the canvas."""
        first, target = self._first[feature] + self.kept(layer).start, self._target(feature, layer, rows)
        if self.code is None or feature not in KEY_VALUE:
            rows.put(target, values, first)
        else:  # as integers: copying codes as floats may change the bits of NaN
            rows.put(target.view(torch.int32), CodedRows.of(values, self.code).bytes.view(torch.int32), first)

    def keep(self, sequences: list[int]) -> None:
        """Keep only these sequences (ascending). The room of the others is not given back before the call ends."""
        for of_kinds in self._tensors.values():
            for kind, stored in enumerate(of_kinds):
                # In ascending order, moving one sequence at a time in place overwrites none that is still needed.
                for new, old in enumerate(sequences):
                    if new != old:
                        stored[:, new].copy_(stored[:, old])
                of_kinds[kind] = stored[:, : len(sequences)]
        self._sequences = len(sequences)

    def _kept(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length stored"]:
        """Stored rows, in elements of the model's dtype."""
        stored = self._tensors[feature][self._kind[layer]]
        return stored[self._places[feature, layer] if stored.shape[0] > 1 else 0, : self._sequences]

    def _target(self, feature: Feature, layer: int, rows: Rows) -> Float[Tensor, "batch heads length stored"]:
        """Stored rows, for a caller that writes `rows` and reads nothing."""
        return self._kept(feature, layer)

    def _coded(
        self, feature: Feature, layer: int, stored: Float[Tensor, "batch heads columns stored"]
    ) -> Float[Tensor, "batch heads columns elements"] | CodedRows:
        if self.code is None or feature not in KEY_VALUE:
            return stored
        head_dim = self._kinds[self._kind[layer]].shape.head_dim
        return CodedRows(stored.view(torch.uint8), self.code, head_dim, stored.dtype)
