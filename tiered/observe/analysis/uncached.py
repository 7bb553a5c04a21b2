"""An uncached pass over the canvas of a step, beside the pass that answers."""

from collections.abc import Callable
from typing import TypeVar

import torch

from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.models.base import DiffusionModel
from tiered.policies.base import Step
from tiered.policies.none import NoCache

_Pass = TypeVar("_Pass", bound=Forward)


def uncached_forward(
    make: Callable[..., _Pass], step: Step, model: DiffusionModel, dtype: torch.dtype, *, copies: int = 1
) -> _Pass:
    """A forward (`make` is `Forward` or a kind of it) over the step's canvas, with a store that every layer overwrites
    and the step's noise mask.

    `copies`: times that every sequence is there, 2 with guidance.
    """
    canvas = step.canvas
    store = FeatureStore(
        model.shape,
        NoCache().features(model.shape),
        batch=copies * canvas.batch,
        length=canvas.length,
        dtype=dtype,
        device=canvas.tokens.device,
    )
    positions, key_mask = canvas.positions(), canvas.key_mask()
    if key_mask is not None:  # else one row of positions serves every sequence
        positions, key_mask = positions.repeat(copies, 1), key_mask.repeat(copies, 1)
    fresh = make(model, store, positions, key_mask)
    fresh.clean = step.start
    return fresh
