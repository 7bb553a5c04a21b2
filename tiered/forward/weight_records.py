"""The matrices of a model's layers, in records and in the modules that use them."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.core.buffers import dtype_name
from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.expert_table import Matrix
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import assign
from tiered.models.shape import ModelShape
from tiered.models.weight_form import WeightForm, places
from tiered.offload.chunk import Chunk, device_chunks
from tiered.offload.copy_segments import Segment
from tiered.offload.errors import NoRoomError


class RecordLayout:
    """The layout of a record: a layer's matrices, or `1 / apart` of each.

    Attributes:
        nbytes: bytes of a record.
        rows: rows of each matrix by name, in the order of the record.
    """

    def __init__(self, shape: ModelShape, dtype: str, form: WeightForm, *, apart: int = 1) -> None:
        self._places, self.nbytes = places(shape, dtype, form, apart=apart)
        self.rows: Mapping[str, int] = {name: out // apart for name, (out, _) in shape.matrices.items()}

    def span(self, name: str, rows: slice | None = None) -> slice:
        """The bytes of one matrix in a record, or of some of its rows."""
        start, nbytes = self._places[name]
        if rows is None:
            return slice(start, start + nbytes)
        row = nbytes // self.rows[name]
        return slice(start + rows.start * row, start + rows.stop * row)


class WeightRecords:
    """The layouts of records, and the modules that own their matrices. On the device a layer is one piece of the layout
    `layer`. A record below the device has the layout `record`: of a layer, or of an expert.

    Attributes:
        model: owner of the matrices.
        form: how the weights are stored.
        layers: layers with records, ascending.
    """

    def __init__(self, model: DiffusionModel, dtype: torch.dtype, form: WeightForm) -> None:
        self.form, self.layers = form, model.shape.recorded
        self.model: Any = model
        self._dtype = dtype
        name = dtype_name(dtype)
        self.layer = RecordLayout(model.shape, name, form)
        self.record = RecordLayout(model.shape, name, form, apart=model.shape.experts_apart)
        self._owners = {layer: [getattr(model.blocks[layer], each) for each in self.names] for layer in self.layers}
        self._views: dict[int, list[Matrix]] = {}  # of the records in slots, by address
        self._shown: int | None = None  # the layer whose modules have such views

    @property
    def names(self) -> Sequence[str]:
        """Names of a layer's matrices, in the order of the record."""
        return list(self.layer.rows)

    def on_device(self, device: torch.device) -> Chunk:
        """Memory for a resident layer. Raises `TierCapacityError` if the device has none."""
        try:
            return device_chunks(device)(self.layer.nbytes)
        except NoRoomError as error:
            raise TierCapacityError(error.needed, error.available, Tier.DEVICE, str(error)) from error

    def write(self, key: Hashable, record: UInt8[Tensor, " record"]) -> None:
        """Copy the bytes of a record from its layer, which is on the device."""
        layer, expert = key if isinstance(key, tuple) else (key, 0)
        for name in self.names:
            weight = getattr(self.model.blocks[layer], name).weight
            stored = weight.bytes if isinstance(weight, CodedRows) else weight.detach().view(torch.uint8)
            part = record[self.record.span(name)]
            part.copy_(stored.flatten()[expert * len(part) : (expert + 1) * len(part)])

    def segments(self, key: Hashable) -> list[Segment]:
        """The places of a record's bytes in its layer."""
        expert = key[1] if isinstance(key, tuple) else 0
        spans = ((self.record.span(name), self.layer.span(name).start) for name in self.names)
        sizes = ((span.start, start, span.stop - span.start) for span, start in spans)
        return [Segment(at, start + expert * size, size) for at, start, size in sizes]

    def assign(self, layer: int, record: UInt8[Tensor, " layer"]) -> None:
        """Make the matrices in `record`, which is a whole layer, the model's permanent ones."""
        for name, weight in zip(self.names, self._matrices(record, self.layer), strict=True):
            assign(self.model, f"blocks.{layer}.{name}.weight", weight)

    def matrix(self, record: UInt8[Tensor, " record"], name: str, layout: RecordLayout) -> Matrix:
        """One matrix in a record, in the form that modules use."""
        out, inner = layout.rows[name], self.model.shape.matrices[name][1]
        stored, code = record[layout.span(name)], self.form.code
        if code is None:
            return stored.view(self._dtype).view(out, inner)
        return CodedRows(stored.view(out, -1), code, inner, self._dtype)

    def views(self, record: UInt8[Tensor, " record"]) -> list[Matrix]:
        """The matrices of a record in a slot. Slots stay the same until `forget_slots`."""
        views = self._views.get(record.data_ptr())
        if views is None:
            views = self._views[record.data_ptr()] = list(self._matrices(record, self.record))
        return views

    def show(self, layer: int, record: UInt8[Tensor, " record"]) -> None:
        """Let the modules of `layer` use the matrices of its record in a slot, until another layer is shown or
        hidden."""
        if self._shown == layer:
            return
        self.hide()
        views = self.views(record)
        self._shown = layer
        # Past `nn.Module`, because assigning parameters takes time and this runs in every forward.
        for owner, weight in zip(self._owners[layer], views, strict=True):
            vars(owner)["weight"] = weight

    def hide(self, other_than: int | None = None) -> None:
        """Unbind the shown layer, unless it is `other_than`."""
        if self._shown is not None and self._shown != other_than:
            self.unbind(self._shown)
            self._shown = None

    def forget_slots(self) -> None:
        """Unbind the shown layer, in any state of a call that was broken off, and drop all views of slots."""
        self.hide()
        self._views.clear()

    def unbind(self, layer: int) -> None:
        """Remove the matrices of `layer` from its modules, so that using them is an error."""
        for owner in self._owners[layer]:
            owner._parameters.pop("weight", None)
            vars(owner)["weight"] = None

    def bound(self, layer: int) -> bool:
        """Whether some modules of `layer` have matrices."""
        return any(owner.weight is not None for owner in self._owners[layer])

    def _matrices(self, record: UInt8[Tensor, " record"], layout: RecordLayout) -> Iterator[Matrix]:
        for name in self.names:
            yield self.matrix(record, name, layout)
