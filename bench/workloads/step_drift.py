"""Moves of keys and values from one step to the next, and the block's attention, by area of the canvas.

Both are figures of the uncached model, whichever policy answers: after each forward the canvas that it read goes
through the model once more. They are the quantities of Barry, "Block-Wise KV Caching for Uniform Diffusion Language
Models", tables 6.6 and 6.7. See docs/analysis.md.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tiered.core.features import Account
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.inputs import Inputs
from tiered.models.shape import ModelShape
from tiered.policies.base import Step, StepKind
from tiered.runtime import Runtime
from workloads.attention_mass import attention_mass, mass_bytes
from workloads.canvas_areas import COLUMNS, MASSES, AreaFigures, area_spans
from workloads.uncached import (
    COMPARED,
    StepFigures,
    counted_rows,
    distances_by_span,
    layers_of,
    new_store,
    uncached_bytes,
    uncached_forward,
)


def measure_step_drift(runtime: Runtime, inputs: Inputs, **generate_options: Any) -> AreaFigures:
    """Answer `inputs` as `runtime.generate(inputs, **generate_options)` does, and measure the model at every step.

    The policy decides the tokens of the canvases, and nothing else. Distances are those of a row from the same row one
    step before. Attention is the share of the weights that the block's rows spend on an area.

    Raises:
        TierCapacityError: the call and the forward beside it do not fit the budget; no work has started.
        TypeError, ValueError: an argument of `generate` is wrong.
    """
    inspector = StepDriftInspector()
    runtime.generate(inputs, inspector=inspector, **generate_options)
    return inspector.report()


class StepDriftInspector:
    """The `Inspector` of one call; `report` has its figures.

    Sequences that wait for others to finish a block are left out. With guidance the canvases that show their prompts
    are measured, not those in which prompts are masked.
    """

    def __init__(self) -> None:
        self._last: FeatureStore | None = None  # keys and values of the step before
        self._figures = StepFigures()

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """Bytes of a forward without logits over one layer's workspace, of all layers of the step before, and of the
        scores of the attention. With guidance half of it would do."""
        kept = dict.fromkeys(COMPARED, shape.layers + 1)
        amounts = uncached_bytes(shape, kept, sequences=sequences, length=length, dtype=dtype)
        amounts[Account.ACTIVATIONS] += mass_bytes(shape, length=length, dtype=dtype)
        return amounts

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """Measure one step."""
        canvas, model, shape = step.canvas, forward.model, forward.model.shape
        dtype, ids = next(model.parameters()).dtype, ids[: canvas.batch]
        counted, spans = counted_rows(step, active), _spans(step)
        if step.number == 0:
            self._last = None  # freed before its successor is allocated
            kept = dict.fromkeys(COMPARED, shape.layers)
            self._last = new_store(shape, kept, ids, dtype)
        assert self._last is not None, "a block begins with its step 0"
        fresh = uncached_forward(_BlockAttention, step, model, ids, dtype)
        fresh.look_at(step, spans)
        sums = torch.full((len(COMPARED), shape.layers, len(spans)), torch.nan, dtype=torch.float64, device=ids.device)
        for layer in layers_of(fresh, ids, slice(step.start, step.stop)):
            if step.number:  # else no step of the block goes before this one
                sums[:, layer] = distances_by_span(self._last, fresh.store, layer, counted, spans)
            for feature in COMPARED:
                self._last.write(feature, layer, canvas.rows, fresh.store.view(feature, layer))
        masses = fresh.masses.where(active[:, None], 0).sum(dim=1)
        weights = active.sum() * ((step.stop - step.start) * shape.heads)
        self._figures.add(step, sums, counted, spans, attention=(masses / weights).cpu())

    def report(self) -> AreaFigures:
        """The figures so far. Raises as `StepFigures.report`."""
        return self._figures.report()


class _BlockAttention(Forward):
    """A forward that sums up the attention of a step's block by area, layer by layer."""

    masses: Float64[Tensor, "layers batch masses"]  # sums over heads and rows

    def look_at(self, step: Step, spans: list[tuple[int, int]]) -> None:
        """Called before the first layer."""
        self._block, self._spans = (step.start, step.stop), spans
        sizes = self.model.shape.layers, step.canvas.batch, len(MASSES)
        self.masses = torch.zeros(sizes, dtype=torch.float64, device=step.canvas.tokens.device)

    def attended(
        self, layer: int, rows: Rows, queries: Float[Tensor, "batch heads rows head_dim"]
    ) -> Float[Tensor, "batch rows heads_width"]:
        span = rows.within
        first, behind = max(span.start, self._block[0]), min(span.stop, self._block[1])
        if first < behind:
            self.masses[layer] += attention_mass(
                queries[:, :, first - span.start : behind - span.start],
                self.keys(layer),
                self._spans,
                key_mask=self.limits.key_mask,
                soft_cap=self.model.shape.soft_cap,
                sink_keys=self.model.sink_keys(layer),
            )
        return super().attended(layer, rows, queries)


def _spans(step: Step) -> list[tuple[int, int]]:
    """Columns of every one of `COLUMNS`."""
    canvas = step.canvas
    answer_stop = canvas.prompt_length + canvas.blocks * canvas.block_length
    areas = area_spans(canvas.prompt_length, step.start, step.stop, answer_stop)
    spans = [*areas.values(), (answer_stop, canvas.length)]
    assert len(spans) == len(COLUMNS)
    return spans
