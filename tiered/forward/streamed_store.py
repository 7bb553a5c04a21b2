"""A feature store that the device has no room for: some layers are resident, the others pass through slots."""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.stream_bytes import StreamBytes
from tiered.forward.streamed_feature import StreamedFeature
from tiered.tiers.tiers import Tiers


class StreamedFeatureStore(FeatureStore):
    """The same interface and the same bits as `FeatureStore`, with two differences. A view of a streamed layer is valid
    only until another layer of its feature is read or written. Reading and writing raise `TransferError` if a copy
    between tiers failed."""

    def __init__(
        self, features: Mapping[Feature, int], needed: StreamBytes, tiers: Tiers, most_rows: int | None = None
    ) -> None:
        """`needed`: streamed layers and their slots; `tiers`: tiers of the call; the others as in `FeatureStore`."""
        streamed = {stream.feature: stream for stream in needed.streams}
        below = {feature: stream.layers for feature, stream in streamed.items()}
        super().__init__(needed.sizes, features, tiers.device, most_rows, below)
        self._tiers = tiers
        self._touched = TouchedColumns()
        dtype = getattr(torch, needed.sizes.dtype)
        self._streamed = {feature: StreamedFeature(stream, tiers, dtype) for feature, stream in streamed.items()}
        self.streamed_from = min((self._first[feature] for feature in streamed), default=None)

    def keep(self, sequences: list[int]) -> None:
        for streamed in self._streamed.values():
            streamed.keep(sequences)
        super().keep(sequences)

    def _kept(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length stored"]:
        self._tiers.traffic.harvest()
        streamed = self._streamed.get(feature)
        if streamed is not None and layer in streamed:
            return streamed.view(layer, self._sequences)
        return super()._kept(feature, layer)

    def _target(self, feature: Feature, layer: int, rows: Rows) -> Float[Tensor, "batch heads length stored"]:
        streamed = self._streamed.get(feature)
        if streamed is None or layer not in streamed:
            return self._kept(feature, layer)
        self._tiers.traffic.harvest()
        columns = np.zeros((self._sequences, streamed.columns), dtype=bool)
        self._touched.mark(columns, rows, self._first[feature])
        return streamed.to_write(layer, columns, whole=rows.is_span and rows.valid is None)


class TouchedColumns:
    """The columns that rows may touch, known on the host, so that a store of chunks can fetch them.

    Caches indices read back from the device, because rows are the same in every layer. Each layer slices its own parts,
    so the cache compares an index by memory and version, not as an object."""

    def __init__(self) -> None:
        # Keeping the indices alive prevents another tensor from having their address.
        self._read: list[tuple[Tensor, int, np.ndarray]] = []

    def mark(self, columns: Bool[np.ndarray, "sequences columns"], rows: Rows, first: int) -> None:
        """Mark the columns that `rows` may touch. `first`: canvas column of the first column here. Rows without
        `Rows.within` cost one read from the device while their index stays the same tensor."""
        if rows.within:
            columns[:, max(0, rows.within.start - first) : max(0, rows.within.stop - first)] = True
        elif rows.count:
            read = self._on_host(rows)
            columns[np.arange(len(read))[:, None], (read - first).clip(0)] = True

    def _on_host(self, rows: Rows) -> Int[np.ndarray, "sequences rows"]:
        index = rows.index
        for known, version, read in self._read:
            if known.data_ptr() == index.data_ptr() and known.shape == index.shape and version == index._version:
                return read
        if self._read and self._read[0][0].untyped_storage().data_ptr() != index.untyped_storage().data_ptr():
            self._read.clear()  # these are other rows
        read = np.asarray(index.tolist())
        self._read.append((index, index._version, read))
        return read
