"""Weights on their way from a checkpoint, each tensor straight to its place."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.forward.weight_bytes import WeightBytes
from tiered.forward.weight_homes import WeightHomes
from tiered.forward.weight_records import RecordLayout, WeightRecords
from tiered.kernels.coded_rows import CodedRows
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import assign
from tiered.offload.file_record import FileRecord
from tiered.tiers.tiers import Home


@dataclass(eq=False, slots=True)
class _Incoming:
    """A record that is being filled, or a layer on the device. `missing`: rows of each matrix that are not there yet.
    `home`: None on the device."""

    layout: RecordLayout
    bytes: UInt8[Tensor, " record"]
    missing: dict[str, int]
    home: Home | None = None


class IncomingWeights:
    """The weights while a checkpoint is read: resident layers in memory of the device, all others in their records.

    Memory of the device is taken before anything is read. Later, tensors that wait to be coded would leave gaps that no
    record fits.
    """

    def __init__(
        self,
        records: WeightRecords,
        now: WeightBytes,
        files: Mapping[Hashable, FileRecord],
        homes: Callable[[], WeightHomes],
        device: torch.device,
    ) -> None:
        """`records`, `now`, `files`: as in `StreamedWeights`. `homes`: opens the tiers of the records.

        Raises:
            TierCapacityError: the device has no memory for the resident layers.
        """
        self._records, self._now, self._files, self._homes = records, now, files, homes
        self._model: DiffusionModel = records.model
        # The first records in this order go below the host.
        self._order = {key: place for place, key in enumerate(key for layer in now.layers for key in now.keys(layer))}
        self._filling: dict[Hashable, _Incoming] = {
            layer: _Incoming(records.layer, records.on_device(device).bytes, dict(records.layer.rows))
            for layer in records.layers
            if layer not in now.layers
        }

    def room(self, own: str, rows: slice | None = None) -> UInt8[Tensor, " nbytes"] | None:
        """The memory for the bytes of the weight named `own`, or of some of its rows. It is in the record of its layer,
        on the device or on the host; None for a weight without a record. Raises `TierCapacityError` if the host has no
        room for the record."""
        found = self._model.shape.place_of(own)
        if found is None:
            return None
        layer, name = found
        key, rows = self._record_of(layer, name, rows)
        layout = self._records.record
        if self._is_read_later(key):  # the bytes are only read for inspection
            span = layout.span(name, rows)
            return torch.empty(span.stop - span.start, dtype=torch.uint8)
        if key not in self._filling:
            home = self._homes().host_home()
            assert home.memory is not None, "it is in host memory"
            self._filling[key] = _Incoming(layout, home.memory, dict(layout.rows), home)
        filling = self._filling[key]
        return filling.bytes[filling.layout.span(name, rows)]

    def place(self, own: str, weight: Tensor | CodedRows, rows: slice | None = None) -> None:
        """Add the weight named `own`, or some of its rows, which are in their `room` if they have one. Errors as
        `WeightHomes.sink`."""
        found = self._model.shape.place_of(own)
        if found is None:
            assign(self._model, own, weight)
            return
        layer, name = found
        if layer in self._now.layers:
            assign(self._model, own, None)
        key, rows = self._record_of(layer, name, rows)
        if self._is_read_later(key):
            if key not in self._homes().residency:  # at its first matrix: the files hold the whole record
                self._homes().read(key)
            return
        filling = self._filling[key]
        filling.missing[name] -= filling.layout.rows[name] if rows is None else rows.stop - rows.start
        if filling.home is None and not filling.missing[name]:
            assign(self._model, own, self._records.matrix(filling.bytes, name, filling.layout))
        if not any(filling.missing.values()):
            del self._filling[key]
            if filling.home is not None:
                self._homes().place(key, filling.home)
            if self._is_below(key):
                self._homes().sink(key)

    def close(self) -> None:
        """Give up the records that are not full."""
        for filling in self._filling.values():
            if filling.home is not None:
                filling.home.free()
        self._filling.clear()

    def _record_of(self, layer: int, name: str, rows: slice | None) -> tuple[Hashable, slice | None]:
        """Key of the record (or the layer on the device) that holds `rows` of a matrix, and their place in it."""
        if layer not in self._now.layers or self._model.shape.experts is None:
            return layer, rows
        assert rows is not None, "experts come one by one"
        expert, first = divmod(rows.start, self._records.record.rows[name])
        return (layer, expert), slice(first, first + rows.stop - rows.start)

    def _is_below(self, key: Hashable) -> bool:
        """Whether a record goes below the host."""
        return self._order.get(key, self._now.below) < self._now.below

    def _is_read_later(self, key: Hashable) -> bool:
        """Whether a record stays in the checkpoint's files."""
        return key in self._files and self._is_below(key)
