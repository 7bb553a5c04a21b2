"""By region of the canvas: how far keys and values move from one step to the next, and where the block's attention
goes.

Both are of the uncached model, whatever policy answers: after each forward the canvas that it read goes through the
model once more. They are the quantities of Barry, "Block-Wise KV Caching for Uniform Diffusion Language Models",
tables 6.6 and 6.7. See docs/analysis.md.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tiered.core.features import Account
from tiered.core.rows import Rows
from tiered.forward.costs import call_bytes
from tiered.forward.forward import Flow, Forward
from tiered.inputs import Inputs
from tiered.models.shape import ModelShape
from tiered.observe.analysis.attention_mass import attention_mass, mass_bytes
from tiered.observe.analysis.region_figures import MASSES, PLACES, RegionReport
from tiered.observe.analysis.regions import region_spans
from tiered.observe.analysis.step_drift import COMPARED, StepDrift
from tiered.observe.analysis.uncached import uncached_forward
from tiered.policies.base import PassKind, Step
from tiered.runtime import Runtime


def measure_regions(runtime: Runtime, inputs: Inputs, **generate_options: Any) -> RegionReport:
    """Answer `inputs` as `runtime.generate(inputs, **generate_options)` does, and measure every step.

    The policy decides the tokens of the canvases that are measured, and nothing else: under `none` they are the
    model's own.

    Raises:
        TierCapacityError: the call and the pass beside it do not fit the budget; no work has started.
        TypeError, ValueError: anything wrong with an argument of `generate`, named.
    """
    inspector = RegionInspector()
    runtime.generate(inputs, inspector=inspector, **generate_options)
    return inspector.report()


class RegionInspector:
    """The `Inspector` of one call; `report` has what it found.

    Sequences that wait for others to finish a block are left out. With guidance it is the canvases that show their
    prompts which are measured, not those in which prompts are masked.
    """

    def __init__(self) -> None:
        self._last: StepDrift | None = None
        # All on the host.
        self._distances: list[Float[Tensor, "features layers places"]] = []
        self._rows: list[Int[Tensor, " places"]] = []
        self._attention: list[Float[Tensor, "layers masses"]] = []
        self._steps: list[tuple[int, int]] = []

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """What the pass takes: one without logits, over a workspace of one layer, beside which the step before keeps
        every layer; and the scores of the attention that is looked at. With guidance half of it would do."""
        kept = dict.fromkeys(COMPARED, shape.layers + 1)
        amounts = call_bytes(shape, kept, batch=sequences, context=length, block_length=0, dtype=dtype)
        amounts[Account.ACTIVATIONS] += mass_bytes(shape, length=length, dtype=dtype)
        return amounts

    def after_forward(
        self,
        step: Step,
        kind: PassKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """Measure one step."""
        canvas, model = step.canvas, forward.model
        layers, dtype = model.shape.layers, next(model.parameters()).dtype
        key_mask = canvas.key_mask()
        counted = active[:, None].expand(-1, canvas.length) if key_mask is None else active[:, None] & key_mask
        spans = _spans(step)
        if step.number == 0:
            self._last = None  # gone before its successor comes
            self._last = StepDrift(model.shape, canvas.batch, canvas.length, dtype=dtype, device=ids.device)
        assert self._last is not None, "a block begins with its step 0"
        fresh = uncached_forward(_BlockAttention, step, model, dtype)
        fresh.look_at(step, spans)
        sums = torch.zeros(len(COMPARED), layers, len(spans), dtype=torch.float64, device=ids.device)
        flow = Flow(Rows.span(0, canvas.length), model.embed(ids[: canvas.batch]), slice(0, canvas.length))
        for layer in range(layers):
            if layer == layers - 1:  # of which the block's rows alone are looked at
                flow = Flow(flow.rows, flow.hidden, slice(step.start, step.stop))
            flow = fresh.dense(layer, flow)
            # A padding row may hold anything, so it is put away rather than multiplied by 0.
            distances = self._last.advance(layer, fresh.store, compare=step.number > 0).where(counted, 0)
            for number, (first, behind) in enumerate(spans):
                sums[:, layer, number] = distances[:, :, first:behind].sum(dim=(1, 2), dtype=torch.float64)
        rows = torch.stack([counted[:, first:behind].sum() for first, behind in spans])
        if step.number == 0:
            sums.fill_(torch.nan)
        self._distances.append((sums / rows).cpu())  # 0/0 is NaN: no columns, no figure
        self._rows.append(rows.cpu())
        masses = fresh.masses.where(active[:, None], 0).sum(dim=1)
        weights = active.sum() * ((step.stop - step.start) * model.shape.heads)
        self._attention.append((masses / weights).cpu())
        self._steps.append((step.block, step.number))

    def report(self) -> RegionReport:
        """What was measured so far.

        Raises:
            ValueError: nothing was; the inspector goes into `Runtime.generate(..., inspector=...)`.
        """
        if not self._steps:
            raise ValueError("no step was measured; pass the inspector to Runtime.generate(..., inspector=...)")
        blocks, numbers = zip(*self._steps, strict=True)
        keys, values = torch.stack(self._distances).unbind(1)
        return RegionReport(
            keys=keys.numpy(),
            values=values.numpy(),
            attention=torch.stack(self._attention).numpy(),
            rows=torch.stack(self._rows).numpy(),
            blocks=list(blocks),
            numbers=list(numbers),
        )


class _BlockAttention(Forward):
    """A forward that sums up where the attention of a step's block goes, layer by layer."""

    masses: Float64[Tensor, "layers batch masses"]  # sums over heads and rows

    def look_at(self, step: Step, spans: list[tuple[int, int]]) -> None:
        """Before the first layer."""
        self._block, self._spans = (step.start, step.stop), spans
        sizes = self.model.shape.layers, step.canvas.batch, len(MASSES)
        self.masses = torch.zeros(sizes, dtype=torch.float64, device=step.canvas.tokens.device)

    def attended(
        self, layer: int, rows: Rows, queries: Float[Tensor, "batch heads rows head_dim"]
    ) -> Float[Tensor, "batch rows heads_width"]:
        assert rows.start is not None, "an uncached pass goes over spans"
        first, behind = max(rows.start, self._block[0]), min(rows.start + rows.count, self._block[1])
        if first < behind:
            self.masses[layer] += attention_mass(
                queries[:, :, first - rows.start : behind - rows.start],
                self.keys(layer),
                self._spans,
                key_mask=self.key_mask,
                soft_cap=self.model.shape.soft_cap,
                sink_keys=self.model.sink_keys(layer),
            )
        return super().attended(layer, rows, queries)


def _spans(step: Step) -> list[tuple[int, int]]:
    """Columns of every one of `PLACES`."""
    canvas = step.canvas
    answer_stop = canvas.prompt_length + canvas.blocks * canvas.block_length
    regions = region_spans(canvas.prompt_length, step.start, step.stop, answer_stop)
    spans = [*regions.values(), (answer_stop, canvas.length)]
    assert len(spans) == len(PLACES)
    return spans
