"""Token drift error: how far the cached keys and values are from those of an uncached pass, while answers are made.

After each forward the canvas that it read goes through the model once more, all rows of it, and the distance of each
cached vector to the recomputed one is 1 − cos. It is the quantity of Polestar's Figure 1. See docs/analysis.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.features import Account, Feature
from tiered.core.rows import Rows
from tiered.forward.costs import call_bytes
from tiered.forward.forward import Flow, Forward
from tiered.inputs import Inputs
from tiered.models.shape import ModelShape
from tiered.observe.analysis.cosine_distance import cosine_distances
from tiered.observe.analysis.regions import region_spans
from tiered.observe.analysis.step_drift import COMPARED
from tiered.observe.analysis.token_drift_report import TokenDriftReport
from tiered.observe.analysis.uncached import uncached_forward
from tiered.policies.base import PassKind, Policy, PolicyState, Step
from tiered.policies.none import NoCache
from tiered.runtime import Runtime


def measure_token_drift(runtime: Runtime, inputs: Inputs, **generate_options: Any) -> TokenDriftReport:
    """Answer `inputs` as `runtime.generate(inputs, **generate_options)` does, and measure the drift of every step.

    A policy that keeps one layer alone has nothing to compare once a forward is over: for the measurement its store has
    room for all layers, which changes no answer.

    Raises:
        TierCapacityError: the call and the recompute beside it do not fit the budget; no work has started.
        TypeError, ValueError: anything wrong with an argument of `generate`, named.
    """
    drift, shape = TokenDrift(), runtime.model.shape
    kept = runtime.policy.features(shape)
    if any(kept[feature] < shape.layers for feature in COMPARED):
        runtime = runtime.with_policy(_AllLayers(policy=runtime.policy))
    runtime.generate(inputs, inspector=drift, **generate_options)
    return drift.report()


class TokenDrift:
    """The `Inspector` of one call; `report` has what it found.

    Sequences that wait for others to finish a block are left out: no forward reads their caches. With guidance both
    halves of the batch count.
    """

    def __init__(self) -> None:
        # All on the host: what is held from step to step takes no room in the device tier.
        self._distances: list[Float[Tensor, "layers features regions"]] = []
        self._rows: list[Int[Tensor, " regions"]] = []
        self._steps: list[tuple[int, int, str]] = []

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """What the recompute takes: an uncached pass without logits. It keeps one layer at a time, as each is compared
        before the next; the comparison's temporaries are fewer than a layer's."""
        return call_bytes(
            shape, NoCache().features(shape), batch=sequences, context=length, block_length=0, dtype=dtype
        )

    def after_forward(
        self,
        step: Step,
        kind: PassKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """Measure one step.

        Raises:
            ValueError: the store has one layer that all share, so those before the last are gone.
        """
        shape, length = forward.model.shape, ids.shape[1]
        # Guidance: every canvas twice, so twice its positions and masks.
        copies = len(ids) // step.canvas.batch
        key_mask = step.canvas.key_mask()
        counted = active[:, None].expand(-1, length) if key_mask is None else active[:, None] & key_mask
        counted = counted.repeat(copies, 1)
        keys = forward.store.view(Feature.KEY, 0)
        if shape.layers > 1 and keys.data_ptr() == forward.store.view(Feature.KEY, shape.layers - 1).data_ptr():
            raise ValueError("the policy keeps one layer of keys and values for all; measure_token_drift gives it room")
        fresh = uncached_forward(Forward, step, forward.model, keys.dtype, copies=copies)
        spans = region_spans(step.canvas.prompt_length, step.start, step.stop, length).values()
        sums = torch.empty(shape.layers, len(COMPARED), len(spans), dtype=torch.float64, device=ids.device)
        flow = Flow(Rows.span(0, length), forward.model.embed(ids), slice(0, length))
        for layer in range(shape.layers):
            last = layer == shape.layers - 1
            # The last layer's keys and values are all that is left to compute: no row of it is asked for.
            flow = fresh.dense(layer, Flow(flow.rows, flow.hidden, slice(0, 0)) if last else flow)
            for place, feature in enumerate(COMPARED):
                distances = cosine_distances(forward.store.view(feature, layer), fresh.store.view(feature, layer))
                # A padding row may hold anything, so it is put away rather than multiplied by 0.
                distances = distances.where(counted, 0)
                for number, (first, behind) in enumerate(spans):
                    sums[layer, place, number] = distances[:, first:behind].sum(dtype=torch.float64)
        rows = torch.stack([counted[:, first:behind].sum() for first, behind in spans])
        self._distances.append((sums / rows).cpu())  # 0/0 is NaN: no columns, no figure
        self._rows.append(rows.cpu())
        self._steps.append((step.block, step.number, kind.value))

    def report(self) -> TokenDriftReport:
        """What was measured so far.

        Raises:
            ValueError: nothing was; the inspector goes into `Runtime.generate(..., inspector=...)`.
        """
        if not self._steps:
            raise ValueError("no step was measured; pass the inspector to Runtime.generate(..., inspector=...)")
        blocks, numbers, kinds = zip(*self._steps, strict=True)
        keys, values = torch.stack(self._distances).unbind(2)
        return TokenDriftReport(
            keys=keys.numpy(),
            values=values.numpy(),
            rows=torch.stack(self._rows).numpy(),
            blocks=list(blocks),
            numbers=list(numbers),
            kinds=list(kinds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllLayers(Policy):
    """A policy without a cache, whose keys and values are kept for all layers all the same."""

    name: ClassVar[str] = "all_layers"
    policy: Policy

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        return {**self.policy.features(shape), **dict.fromkeys(COMPARED, shape.layers)}

    def start(self) -> PolicyState:
        return self.policy.start()
