"""Token drift error: distances of cached keys and values from those of an uncached forward, while answers are made.

After each forward the canvas that it read goes through the model once more, all rows of it. The distance of a cached
vector from the recomputed one is 1 - cos. It is the quantity of Polestar's Figure 1. See docs/analysis.md.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.features import Account, Feature
from tiered.forward.forward import Forward
from tiered.inputs import Inputs
from tiered.models.shape import ModelShape
from tiered.policies.base import Step, StepKind
from tiered.policies.row_schedule import row_schedule
from tiered.runtime import Runtime
from workloads.canvas_areas import AreaFigures, area_spans
from workloads.uncached import (
    StepFigures,
    counted_rows,
    distances_by_span,
    layers_of,
    uncached_bytes,
    uncached_forward,
)


def measure_staleness(runtime: Runtime, inputs: Inputs, **generate_options: Any) -> AreaFigures:
    """Answer `inputs` as `runtime.generate(inputs, **generate_options)` does, and measure the caches at every step.

    Raises:
        TierCapacityError: the call and the recompute beside it do not fit the budget; no work has started.
        TypeError, ValueError: an argument of `generate` is wrong, or the policy keeps one layer at a time.
    """
    inspector = StalenessInspector()
    runtime.generate(inputs, inspector=inspector, **generate_options)
    return inspector.report()


class StalenessInspector:
    """The `Inspector` of one call; `report` has its figures.

    Sequences that wait for others to finish a block are left out: no forward reads their caches. With guidance both
    halves of the batch count.
    """

    def __init__(self) -> None:
        self._figures = StepFigures()

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """Bytes of the recompute: an uncached forward without logits, which keeps one layer at a time. The temporaries
        of a comparison are fewer than those of a layer."""
        kept = row_schedule("none").features(shape)
        return uncached_bytes(shape, kept, sequences=sequences, length=length, dtype=dtype)

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """Measure one step.

        Raises:
            ValueError: the store has one layer for all, so that earlier layers are overwritten.
        """
        layers = forward.model.shape.layers
        keys = forward.store.view(Feature.KEY, 0)
        if layers > 1 and keys.data_ptr() == forward.store.view(Feature.KEY, layers - 1).data_ptr():
            raise ValueError("the policy keeps keys and values of one layer at a time: there is no cache to compare")
        counted = counted_rows(step, active).repeat(len(ids) // step.canvas.batch, 1)
        spans = [*area_spans(step.canvas.prompt_length, step.start, step.stop, ids.shape[1]).values()]
        fresh = uncached_forward(Forward, step, forward.model, ids, keys.dtype)
        # No row of the output: keys and values of the last layer suffice.
        sums = [
            distances_by_span(forward.store, fresh.store, layer, counted, spans)
            for layer in layers_of(fresh, ids, slice(0, 0))
        ]
        self._figures.add(step, torch.stack(sums, dim=1), counted, spans)

    def report(self) -> AreaFigures:
        """The figures so far. Raises as `StepFigures.report`."""
        return self._figures.report()
