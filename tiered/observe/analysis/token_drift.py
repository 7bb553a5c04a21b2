"""Token drift error, or staleness: how far the cached keys and values are from those of an uncached forward, while
answers are made.

After each forward the canvas that it read goes through the model once more, all rows of it, and the distance of each
cached vector to the recomputed one is 1 − cos. It is the quantity of Polestar's Figure 1. See docs/analysis.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.features import Account, Feature
from tiered.forward.forward import Forward
from tiered.forward.forward_bytes import forward_bytes
from tiered.forward.sizes import CallSizes
from tiered.inputs import Inputs
from tiered.models.shape import ModelShape
from tiered.observe.analysis.reports import TokenDriftReport, area_spans, check_canvas
from tiered.observe.analysis.uncached import (
    COMPARED,
    StepFigures,
    counted_rows,
    distances_by_span,
    layers_of,
    uncached_forward,
)  # fmt: skip
from tiered.policies.base import Policy, PolicyState, Step, StepKind
from tiered.policies.row_schedule import row_schedule
from tiered.runtime import Runtime


def measure_token_drift(runtime: Runtime, inputs: Inputs, **generate_options: Any) -> TokenDriftReport:
    """Answer `inputs` as `runtime.generate(inputs, **generate_options)` does, and measure how stale every step's caches
    are.

    A policy that keeps one layer alone has nothing to compare once a forward is over: for the measurement its store has
    room for all layers, which changes no answer.

    Raises:
        TierCapacityError: the call and the recompute beside it do not fit the budget; no work has started.
        TypeError, ValueError: anything wrong with an argument of `generate`, named.
    """
    inspector, shape = StalenessInspector(), runtime.model.shape
    asked = {name: value for name, value in generate_options.items() if name not in ("prior", "streamer")}
    runtime = runtime.with_policy(runtime.choose(inputs, **asked).policy)
    kept = runtime.policy.features(shape)
    if any(kept[feature] < shape.layers for feature in COMPARED):
        runtime = runtime.with_policy(_AllLayers(policy=runtime.policy))
    runtime.generate(inputs, inspector=inspector, **generate_options)
    return inspector.report()


class StalenessInspector:
    """The `Inspector` of one call; `report` has what it found.

    Sequences that wait for others to finish a block are left out: no forward reads their caches. With guidance both
    halves of the batch count.
    """

    def __init__(self) -> None:
        self._figures = StepFigures()

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """What the recompute takes: an uncached forward without logits. It keeps one layer at a time, each compared
        before the next; the comparison's temporaries are fewer than a layer's."""
        check_canvas(shape)
        sizes = CallSizes(shape=shape, batch=sequences, context=length, block_length=0, dtype=dtype)
        return forward_bytes(sizes, row_schedule("none").features(shape))

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
            ValueError: the store has one layer that all share, so those before the last are gone.
        """
        layers = forward.model.shape.layers
        keys = forward.store.view(Feature.KEY, 0)
        if layers > 1 and keys.data_ptr() == forward.store.view(Feature.KEY, layers - 1).data_ptr():
            raise ValueError("the policy keeps one layer of keys and values for all; measure_token_drift gives it room")
        counted = counted_rows(step, active).repeat(len(ids) // step.canvas.batch, 1)
        spans = [*area_spans(step.canvas.prompt_length, step.start, step.stop, ids.shape[1]).values()]
        fresh = uncached_forward(Forward, step, forward.model, ids, keys.dtype)
        # Of the last layer keys and values are all that is compared: no row of the output is asked for.
        sums = [
            distances_by_span(forward.store, fresh.store, layer, counted, spans)
            for layer in layers_of(fresh, ids, slice(0, 0))
        ]
        self._figures.add(step, torch.stack(sums, dim=1), counted, spans, kinds=kind.value)

    def report(self) -> TokenDriftReport:
        """What was measured so far. Errors as `StepFigures.fields`."""
        return TokenDriftReport(**self._figures.fields())


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllLayers(Policy):
    """A policy without a cache, whose keys and values are kept for all layers all the same."""

    name: ClassVar[str] = "all_layers"
    policy: Policy

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        return {**self.policy.features(shape), **dict.fromkeys(COMPARED, shape.layers)}

    def start(self) -> PolicyState:
        return self.policy.start()
