"""Keys and values that a call leaves in its cache."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiered.core.features import Feature
from tiered.decoding.observers import Inspector
from tiered.forward.forward import Forward
from tiered.policies.base import Step, StepKind


@dataclass
class Stores(Inspector):
    """Keys and values of the whole batch after every forward."""

    left: list[Tensor] = field(default_factory=list)

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        layers = range(forward.model.shape.layers)
        both = [forward.store.view(feature, layer) for layer in layers for feature in (Feature.KEY, Feature.VALUE)]
        self.left.append(torch.stack(both))
