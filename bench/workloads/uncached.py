"""An uncached forward over the canvas of a step, beside the forward that answers, and distances of its keys and
values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import normalize

from tiered.core.buffers import account_bytes
from tiered.core.features import Account, Feature
from tiered.core.rows import parts_of
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.forward_bytes import forward_buffers, part_rows
from tiered.forward.parts import CanvasLimits
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.models.base import DiffusionModel
from tiered.models.shape import ModelShape
from tiered.policies.base import Step
from tiered.policies.row_schedule import row_schedule
from workloads.canvas_areas import AreaFigures, check_canvas

COMPARED: tuple[Feature, ...] = (Feature.KEY, Feature.VALUE)

_Forward = TypeVar("_Forward", bound=Forward)


def uncached_forward(
    make: Callable[..., _Forward],
    step: Step,
    model: DiffusionModel,
    ids: Int[Tensor, "sequences length"],
    dtype: torch.dtype,
) -> _Forward:
    """A forward over the step's canvas, with the step's noise mask and a store that every layer overwrites.

    `make`: `Forward` or a subclass. `ids`: the canvas, twice with guidance.
    """
    canvas, kept = step.canvas, row_schedule("none").features(model.shape)
    batch, length = ids.shape
    store = new_store(model.shape, kept, ids, dtype)
    positions, key_mask = canvas.positions(), canvas.key_mask()
    if key_mask is not None:  # else one row of positions serves every sequence
        copies = batch // canvas.batch
        positions, key_mask = positions.repeat(copies, 1), key_mask.repeat(copies, 1)
    return make(model, store, positions, CanvasLimits(model.shape, length, key_mask=key_mask, final=step.start))


def uncached_bytes(
    shape: ModelShape, kept: Mapping[Feature, int], *, sequences: int, length: int, dtype: str
) -> dict[Account, int]:
    """Bytes of an uncached forward without logits. `kept`: number of layers whose rows are kept, by feature.

    Raises:
        ValueError: rows of the model see blocks.
    """
    check_canvas(shape)
    return account_bytes(forward_buffers(_sizes(shape, sequences, length, dtype), kept))


def new_store(
    shape: ModelShape, kept: Mapping[Feature, int], ids: Int[Tensor, "sequences length"], dtype: torch.dtype
) -> FeatureStore:
    """A store for as many columns of as many sequences as `ids` has. `kept`: number of layers by feature."""
    batch, length = ids.shape
    return FeatureStore(_sizes(shape, batch, length, str(dtype).removeprefix("torch.")), kept, ids.device)


def _sizes(shape: ModelShape, sequences: int, length: int, dtype: str) -> CallShape:
    return CallShape(shape=shape, batch=sequences, context=length, block_length=0, dtype=dtype)


def layers_of(fresh: Forward, ids: Int[Tensor, "sequences length"], asked: slice) -> Iterator[int]:
    """Each layer, once it has been computed over all rows. `asked`: the last layer's rows that are the output."""
    pass_ = Pass(ids, fresh.rows, slice(0, fresh.length), hidden=fresh.model.embed(ids))
    for layer in range(fresh.model.shape.layers):
        if layer == fresh.model.shape.layers - 1:
            pass_ = replace(pass_, output=asked)
        pass_ = fresh.dense(layer, pass_)
        yield layer


def counted_rows(step: Step, active: Bool[Tensor, " batch"]) -> Bool[Tensor, "batch length"]:
    """True at the columns of the sequences that took part, padding left out."""
    key_mask = step.canvas.key_mask()
    return active[:, None].expand(-1, step.canvas.length) if key_mask is None else active[:, None] & key_mask


class StepFigures:
    """Figures of every step of a call. All are on the host: they take no room in the device tier."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []

    def add(
        self,
        step: Step,
        sums: Float64[Tensor, "features layers spans"],
        counted: Bool[Tensor, "sequences length"],
        spans: Sequence[tuple[int, int]],
        **more: Tensor,
    ) -> None:
        """Add a step: the means of `sums` over the `counted` rows of each span, and `more`."""
        rows = torch.stack([counted[:, first:behind].sum() for first, behind in spans])
        keys, values = (sums / rows).cpu()  # 0/0 is NaN: no columns, no figure
        where = {"blocks": step.block, "numbers": step.number}
        self._steps.append({"keys": keys, "values": values, "rows": rows.cpu(), **where, **more})

    def report(self) -> AreaFigures:
        """Arrays and lists, by step.

        Raises:
            ValueError: there is no step; the inspector goes into `Runtime.generate(..., inspector=...)`.
        """
        if not self._steps:
            raise ValueError("no step was measured; pass the inspector to Runtime.generate(..., inspector=...)")
        columns = {name: [figures[name] for figures in self._steps] for name in self._steps[0]}
        fields: dict[str, Any] = {
            name: torch.stack(column).numpy() if isinstance(column[0], Tensor) else column
            for name, column in columns.items()
        }
        return AreaFigures(**fields)


def distances_by_span(
    left: FeatureStore,
    right: FeatureStore,
    layer: int,
    counted: Bool[Tensor, "sequences length"],
    spans: Sequence[tuple[int, int]],
) -> Float64[Tensor, "features spans"]:
    """Sums of `cosine_distances` of one layer's keys and values over the `counted` rows of each span."""
    distances = [cosine_distances(left.view(feature, layer), right.view(feature, layer)) for feature in COMPARED]
    # A padding row may hold NaN, which times 0 is NaN.
    there = torch.stack(distances).where(counted, 0)
    sums = [there[:, :, first:behind].sum(dim=(1, 2), dtype=torch.float64) for first, behind in spans]
    return torch.stack(sums, dim=1)


def cosine_distances(
    left: Float[Tensor, "sequences heads length elements"], right: Float[Tensor, "sequences heads length elements"]
) -> Float[Tensor, "sequences length"]:
    """1 − cos of each column's vectors, the mean over heads, in float32, a part of the columns at a time.

    It is computed as |u − v|² / 2 of the unit vectors, which is the same number. It is 0 if both are the same and never
    below, while 1 − cos rounds to steps of 6e-8.
    """
    distances = torch.empty(left.shape[0], left.shape[2], device=left.device)
    for part in parts_of(left.shape[2], part_rows(len(left))):
        apart = normalize(left[:, :, part].float(), dim=-1).sub_(normalize(right[:, :, part].float(), dim=-1))
        distances[:, part] = apart.square_().sum(dim=-1).mean(dim=1).div_(2)
    return distances
