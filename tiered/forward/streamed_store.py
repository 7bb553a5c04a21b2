"""A feature store that the device has no room for: some layers are resident, the others pass through workspaces."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.page_indices import PageIndices
from tiered.forward.paged_feature import PagedFeature
from tiered.forward.stream_bytes import StreamBytes
from tiered.kernels.row_code import RowCode
from tiered.models.shape import ModelShape
from tiered.tiers.manager import TierManager


class StreamedFeatureStore(FeatureStore):
    """The same as a `FeatureStore`, to the bit, and with the same verbs; but what is read of a streamed layer is valid
    only until another layer of its feature is read or written, and reading and writing raise `RecordLostError` or
    `TransferError` where a copy between the tiers failed."""

    def __init__(
        self,
        shape: ModelShape,
        features: Mapping[Feature, int],
        needed: StreamBytes,
        tiers: TierManager,
        *,
        batch: int,
        length: int,
        answer_start: int = 0,
        kv: RowCode | None = None,
    ) -> None:
        """`needed`: which layers are streamed, and through what; `tiers`: where they are. Else as `FeatureStore`."""
        streamed = {stream.feature: stream for stream in needed.streams}
        resident = {
            feature: [
                layer for layer in range(layers) if feature not in streamed or layer not in streamed[feature].layers
            ]
            for feature, layers in features.items()
        }
        super().__init__(
            shape,
            {feature: len(layers) for feature, layers in resident.items()},
            batch=batch,
            length=length,
            answer_start=answer_start,
            dtype=tiers.dtype,
            device=tiers.device,
            kv=kv,
        )
        self._place = {
            feature: {layer: place for place, layer in enumerate(layers)}
            for feature, layers in resident.items()
            if feature in streamed
        }
        self._tiers = tiers
        indices = PageIndices(needed.index_bytes, tiers.device)
        self._columns = TouchedColumns()
        self._paged = {
            feature: PagedFeature(
                feature,
                stream.layers,
                stream.pages,
                workspaces=stream.workspaces,
                tiers=tiers,
                indices=indices,
            )
            for feature, stream in streamed.items()
        }

    @property
    def streamed_from(self) -> int | None:
        """See `FeatureStore.streamed_from`."""
        return min(self._first[feature] for feature in self._paged)

    def keep(self, sequences: list[int]) -> None:
        """See `FeatureStore.keep`."""
        for paged in self._paged.values():
            paged.keep(sequences)
        super().keep(sequences)

    def _kept(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length stored"]:
        self._tiers.progress()
        paged = self._paged.get(feature)
        if paged is None:
            return super()._kept(feature, layer)
        if layer in paged:
            return paged.view(layer, self._sequences)
        return super()._kept(feature, self._place[feature][layer])

    def _target(self, feature: Feature, layer: int, rows: Rows) -> Float[Tensor, "batch heads length stored"]:
        paged = self._paged.get(feature)
        if paged is None or layer not in paged:
            return self._kept(feature, layer)
        self._tiers.progress()
        first = self._first[feature]
        start, stop = (max(0, column - first) for column in self._columns.of(rows))
        whole = rows.is_span and rows.valid is None
        return paged.to_write(layer, self._sequences, (start, stop), whole=whole)


class TouchedColumns:
    """The columns that rows may touch, known on the host: what a store in pages has to have there.

    Remembers what it had to read back from the device: rows are the same in every layer, though each layer cuts parts
    of its own from them. So an index is known by its memory and by how often that was written, not as an object."""

    def __init__(self) -> None:
        # The indices themselves are kept: while they are alive, no other tensor has their address.
        self._read: list[tuple[torch.Tensor, int, tuple[int, int]]] = []

    def of(self, rows: Rows) -> tuple[int, int]:
        """First column and the one behind the last. Rows whose maker does not say it (`Rows.within`) cost
        one read from the device for as long as their index stays the same tensor."""
        if rows.within:
            return rows.within.start, rows.within.stop
        index = rows.index
        if not index.numel():
            return 0, 0
        for known, version, columns in self._read:
            if known.data_ptr() == index.data_ptr() and known.shape == index.shape and version == index._version:
                return columns
        if self._read and self._read[0][0].untyped_storage().data_ptr() != index.untyped_storage().data_ptr():
            self._read.clear()  # other rows
        first, last = torch.stack(index.aminmax()).tolist()
        self._read.append((index, index._version, (first, last + 1)))
        return first, last + 1
