"""A feature store that the device has no room for: some layers are resident, the others pass through workspaces."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.flights import Flights
from tiered.forward.page_indices import PageIndices
from tiered.forward.paged_feature import PagedFeature
from tiered.forward.stream_costs import StreamCosts
from tiered.forward.touched_columns import TouchedColumns
from tiered.models.shape import ModelShape
from tiered.tiers.manager import TierManager


class StreamedFeatureStore(FeatureStore):
    """The same as a `FeatureStore`, to the bit, and with the same verbs; but a view of a streamed layer is valid only
    until another layer of its feature is viewed or written."""

    def __init__(
        self,
        shape: ModelShape,
        features: Mapping[Feature, int],
        costs: StreamCosts,
        tiers: TierManager,
        *,
        batch: int,
        length: int,
        answer_start: int = 0,
    ) -> None:
        """`costs`: which layers are streamed, and through what; `tiers`: where they are. Else as `FeatureStore`."""
        streamed = {stream.feature: stream for stream in costs.streams}
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
        )
        self._place = {
            feature: {layer: place for place, layer in enumerate(layers)}
            for feature, layers in resident.items()
            if feature in streamed
        }
        flights, indices = Flights(tiers), PageIndices(costs.index_bytes, tiers.device)
        self._flights = flights
        self._columns = TouchedColumns()
        self._paged = {
            feature: PagedFeature(
                feature,
                stream.layers,
                stream.pages,
                workspaces=stream.workspaces,
                tiers=tiers,
                flights=flights,
                indices=indices,
            )
            for feature, stream in streamed.items()
        }

    @property
    def streamed_from(self) -> int | None:
        """See `FeatureStore.streamed_from`."""
        return min(self._first[feature] for feature in self._paged)

    def view(self, feature: Feature, layer: int) -> Float[Tensor, "batch heads length elements"]:
        """See `FeatureStore.view`.

        Raises:
            RecordLostError, TransferError: a copy between the tiers failed.
        """
        self._flights.land_arrived()
        paged = self._paged.get(feature)
        if paged is None:
            return super().view(feature, layer)
        if layer in paged:
            return paged.view(layer, self._sequences)
        return super().view(feature, self._place[feature][layer])

    def write(
        self, feature: Feature, layer: int, rows: Rows, values: Float[Tensor, "batch heads rows elements"]
    ) -> None:
        """See `FeatureStore.write`. Errors as `view`."""
        paged = self._paged.get(feature)
        if paged is None or layer not in paged:
            super().write(feature, layer, rows, values)
            return
        self._flights.land_arrived()
        first = self._first[feature]
        start, stop = (max(0, column - first) for column in self._columns.of(rows))
        whole = rows.start is not None and rows.valid is None
        target = paged.to_write(layer, self._sequences, (start, stop), whole=whole)
        (rows.moved(-first) if first else rows).put(target, values)

    def keep(self, sequences: list[int]) -> None:
        """See `FeatureStore.keep`. Errors as `view`."""
        for paged in self._paged.values():
            paged.keep(sequences)
        super().keep(sequences)
