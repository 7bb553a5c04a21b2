"""Step drift: how far keys and values are from those of the step before."""

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.models.shape import ModelShape
from tiered.observe.analysis.cosine_distance import cosine_distances

COMPARED: tuple[Feature, ...] = (Feature.KEY, Feature.VALUE)


class StepDrift:
    """Keeps keys and values of all layers from one step of a block to the next."""

    def __init__(
        self, shape: ModelShape, sequences: int, length: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        features = dict.fromkeys(COMPARED, shape.layers)
        self._kept = FeatureStore(shape, features, batch=sequences, length=length, dtype=dtype, device=device)
        self._rows = Rows.span(0, length)

    def advance(self, layer: int, store: FeatureStore, *, compare: bool) -> Float[Tensor, "features sequences length"]:
        """1 − cos of what `store` holds for `layer` and what it held the last time, keys and values apart, by column,
        the mean over heads; 0 unless `compare` says that there was a last time."""
        distances = []
        for feature in COMPARED:
            fresh, kept = store.view(feature, layer), self._kept.view(feature, layer)
            sequences, _, length, _ = fresh.shape
            distances.append(cosine_distances(kept, fresh) if compare else fresh.new_zeros(sequences, length).float())
            self._kept.write(feature, layer, self._rows, fresh)
        return torch.stack(distances)
