"""Keys and values that a call leaves in its cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiered.core.features import Account, Feature
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.policies.base import Step, StepKind


@dataclass
class Stores:
    """An inspector: keys and values of the whole batch after every forward."""

    left: list[Tensor] = field(default_factory=list)

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        return {}

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        layers = range(forward.model.shape.layers)
        both = [forward.store.view(feature, layer) for layer in layers for feature in (Feature.KEY, Feature.VALUE)]
        self.left.append(torch.stack(both))
