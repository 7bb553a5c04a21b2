"""Shared by the tests of figures by area: a padded batch, and an inspector that keeps copies."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tiered.core.features import Feature
from tiered.decoding.observers import Inspector
from tiered.forward.forward import Forward
from tiered.policies.base import Step, StepKind

LENGTHS = (17, 9, 12)


def left_padded() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    ids, mask = torch.full((len(LENGTHS), max(LENGTHS)), 499), torch.zeros(len(LENGTHS), max(LENGTHS)).long()
    for row, length in enumerate(LENGTHS):
        ids[row, -length:] = torch.randint(2, 480, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"inputs": ids, "attention_mask": mask}


@dataclass
class Spy(Inspector):
    """Keeps every canvas, and what the store held; `layers`: how many of them the policy keeps."""

    layers: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        stored = {
            feature: torch.stack([forward.store.view(feature, layer) for layer in range(self.layers)])
            for feature in (Feature.KEY, Feature.VALUE)
            if self.layers
        }
        place = {"block": step.block, "number": step.number, "start": step.start, "stop": step.stop}
        self.seen.append({**place, "ids": ids.clone(), "stored": stored, "active": active.tolist()})
