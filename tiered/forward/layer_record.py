"""The matrices of a model's layers as they stand in records, one record a layer, and in the modules that use them."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.kernels.coded_rows import CodedRows
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import assign
from tiered.models.weight_form import TABLES, WeightForm, places
from tiered.offload.chunk import Chunk, device_chunks
from tiered.offload.errors import NoRoomError

Matrix = Tensor | CodedRows


class LayerRecords:
    """Where each matrix of a layer stands in the layer's record, and the modules that it belongs to.

    Attributes:
        form: how the weights are kept.
        nbytes: bytes of a record.
        layers: layers with a record, ascending.
    """

    def __init__(self, model: DiffusionModel, dtype: torch.dtype, form: WeightForm) -> None:
        self.form, self.layers = form, model.shape.recorded
        self._model, self._dtype = model, dtype
        self._places, self.nbytes = places(model.shape, str(dtype).removeprefix("torch."), form)
        self._owners = {layer: [getattr(model.blocks[layer], each) for each in self._places] for layer in self.layers}
        self._views: dict[int, list[Matrix]] = {}  # of the records in slots, by address
        self._shown: int | None = None  # the layer whose modules have such views

    @property
    def names(self) -> Sequence[str]:
        """Names of a layer's matrices, in the order of the record."""
        return list(self._places)

    def find(self, own: str) -> tuple[int, str] | None:
        """`ModelShape.place_of`."""
        return self._model.shape.place_of(own)

    def may_be_coded(self, own: str) -> bool:
        """Whether the weight that we call `own` is in the form's code, if it has one."""
        return self._model.shape.is_matrix(own) or (self.form.head and own in TABLES)

    def on_device(self, device: torch.device) -> Chunk:
        """Memory for the record of a layer that stays. Raises `TierCapacityError` if the device has none."""
        try:
            return device_chunks(device)(self.nbytes)
        except NoRoomError as error:
            raise TierCapacityError(error.needed, error.available, Tier.DEVICE, str(error)) from error

    def part(self, record: UInt8[Tensor, " record"], name: str, rows: slice | None = None) -> UInt8[Tensor, " nbytes"]:
        """The bytes of one matrix in a record, or of some of its rows."""
        start = self._places[name][0] + (0 if rows is None else rows.start * self._row_bytes(name))
        return record[start : start + self.part_bytes(name, rows)]

    def part_bytes(self, name: str, rows: slice | None = None) -> int:
        return self._places[name][1] if rows is None else (rows.stop - rows.start) * self._row_bytes(name)

    def rows(self, name: str) -> int:
        """Rows of a matrix."""
        return self._model.shape.matrices[name][0]

    def _row_bytes(self, name: str) -> int:
        return self._places[name][1] // self.rows(name)

    def write(self, layer: int, record: UInt8[Tensor, " record"]) -> None:
        """Copy the matrices of a layer that is on the device to its record."""
        for name in self._places:
            weight = getattr(self._model.blocks[layer], name).weight
            stored = weight.bytes if isinstance(weight, CodedRows) else weight.detach().view(torch.uint8)
            self.part(record, name).copy_(stored.flatten())

    def assign(self, layer: int, record: UInt8[Tensor, " record"]) -> None:
        """Make the matrices in `record` the model's, to stay."""
        for name, weight in zip(self._places, self._matrices(record), strict=True):
            assign(self._model, f"blocks.{layer}.{name}.weight", weight)

    def matrix(self, record: UInt8[Tensor, " record"], name: str) -> Matrix:
        """One matrix in a record, as its modules use it."""
        (out, inner), stored, code = self._model.shape.matrices[name], self.part(record, name), self.form.code
        if code is None:
            return stored.view(self._dtype).view(out, inner)
        return CodedRows(stored.view(out, -1), code, inner, self._dtype)

    def place(self, own: str, weight: Matrix | None) -> None:
        """Make `weight` the one that we call `own`; None for a weight that is elsewhere."""
        assign(self._model, own, weight)

    def show(self, layer: int, record: UInt8[Tensor, " record"]) -> None:
        """Let the modules of `layer` use the matrices of its record in a slot, until another layer is shown or hidden.
        Slots are the same ones until `forget_slots`."""
        if self._shown == layer:
            return
        self.hide()
        views = self._views.get(record.data_ptr())
        if views is None:
            views = self._views[record.data_ptr()] = list(self._matrices(record))
        self._shown = layer
        # Right into their attributes: a module takes its time for a parameter, and there is one for every forward.
        for owner, weight in zip(self._owners[layer], views, strict=True):
            vars(owner)["weight"] = weight

    def hide(self, other_than: int | None = None) -> None:
        """No layer is shown any more, except for `other_than`."""
        if self._shown is not None and self._shown != other_than:
            self.unbind(self._shown)
            self._shown = None

    def forget_slots(self) -> None:
        """No layer is shown, in whatever state a call was broken off, and slots will be others."""
        self.hide()
        self._views.clear()

    def unbind(self, layer: int) -> None:
        """Leave the modules of `layer` without matrices: their use is an error then."""
        for owner in self._owners[layer]:
            owner._parameters.pop("weight", None)
            vars(owner)["weight"] = None

    def bound(self, layer: int) -> bool:
        """Whether some modules of `layer` have matrices."""
        return any(owner.weight is not None for owner in self._owners[layer])

    def _matrices(self, record: UInt8[Tensor, " record"]) -> Iterator[Matrix]:
        for name in self._places:
            yield self.matrix(record, name)
