"""The streamed layers of one feature: each is a record with a home in host memory, and is used in a slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.stream_bytes import FeatureStream
from tiered.offload.fence import Region
from tiered.tiers.parts import Parts, Wanted
from tiered.tiers.residency import Residency
from tiered.tiers.tiers import Tiers

Columns = Bool[np.ndarray, "sequences columns"]


@dataclass(eq=False, slots=True)
class _Written:
    """Columns of a layer that were written and not sent home yet, and their chunks."""

    layer: int
    columns: Columns
    parts: Parts


class StreamedFeature:
    """The streamed layers of a feature. A slot has the layout of a resident layer, so a reader computes the same bits.

    Columns that a step writes in a layer are sent home together when the layer is read or another layer is used. The
    next streamed layer needs the same chunks as this layer, so they are fetched to another slot at once.
    """

    def __init__(self, stream: FeatureStream, tiers: Tiers, dtype: torch.dtype) -> None:
        """Raises `TierCapacityError` if a tier has no room for the slots or the homes."""
        layers = stream.layers
        self._following = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
        self._ahead = stream.slots > 1 and len(layers) > 1
        self._chunks, self._dtype = stream.chunks(), dtype
        self._written: _Written | None = None
        self._views: dict[int, Tensor] = {}  # of slots, by address
        self._residency = Residency(tiers.traffic, tiers.record)
        self._residency.open(tiers.slots(Region.FETCH_SLOT, stream.slots, stream.slot_bytes))
        tiers.memory.callback(self._residency.close)
        for layer in layers:
            home = tiers.host_home(stream.account, stream.layer_bytes, stream.room)
            self._residency.place(layer, home, layout=self._chunks, filled=False, layer=layer)

    @property
    def columns(self) -> int:
        return self._chunks.columns

    def __contains__(self, layer: object) -> bool:
        return layer in self._residency

    @spanned(Op.CHUNKS)
    def view(self, layer: int, sequences: int) -> Float[Tensor, "batch heads columns elements"]:
        """A view of the stored columns of the first `sequences`, valid until another layer is used.

        Raises:
            TransferError: a copy failed.
        """
        self._send_home()
        return self._use(layer, self._chunks.of(sequences))[:sequences]

    @spanned(Op.CHUNKS)
    def to_write(self, layer: int, columns: Columns, *, whole: bool) -> Float[Tensor, "batch heads columns elements"]:
        """As `view`, to be written only in `columns` of the first sequences. `whole`: the caller writes all of
        them, so chunks within them are not fetched. Errors as `view`."""
        chunks, earlier = self._chunks, self._written
        if earlier is not None and (earlier.layer != layer or len(earlier.columns) != len(columns)):
            self._send_home()
        touched = chunks.touched(columns)
        view = self._use(layer, touched & ~chunks.covered(columns) if whole else touched)
        self._residency.write(layer, touched)
        if self._written is None:
            self._written = _Written(layer, columns, touched)
        else:
            self._written.columns |= columns
            self._written.parts |= touched
        return view[: len(columns)]

    @spanned(Op.CHUNKS)
    def keep(self, sequences: Sequence[int]) -> None:
        self._send_home()
        self._residency.empty()
        self._chunks.keep(sequences)

    def _use(self, layer: int, parts: Parts) -> Float[Tensor, "batch heads columns elements"]:
        wanted, ahead = Wanted(layer, parts), []
        if self._ahead and (brought := self._residency.brought(wanted)).any():
            ahead.append(Wanted(self._following[layer], brought))
        (slot,) = self._residency.use([wanted], ahead)
        view = self._views.get(slot.data_ptr())
        if view is None:
            chunks = self._chunks
            view = slot.view(self._dtype).view(chunks.sequences, chunks.heads, chunks.columns, -1)
            self._views[slot.data_ptr()] = view
        return view

    def _send_home(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            columns = self._chunks.joined(written.columns, written.parts)
            self._residency.patch(written.layer, self._chunks.segments_of(columns))
