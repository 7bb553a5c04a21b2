"""The ring that streamed layers pass through: one is used in its slot, while the next one arrives in another."""

from contextlib import ExitStack
from typing import NamedTuple

import torch

from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.forward.layer_record import LayerRecords, Matrix
from tiered.forward.weight_bytes import RING_SLOTS
from tiered.offload.arena import device_chunks
from tiered.offload.fence import Region
from tiered.offload.ring import RingSlot
from tiered.tiers.host_pool import booked
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_ring
from tiered.tiers.ticket import Ticket


class _Here(NamedTuple):
    """A layer in a slot of the ring, or on its way there: it is used once `ticket` was waited for."""

    slot: RingSlot
    ticket: Ticket


class LayerRing:
    """Slots of `slot_bytes` on the device. The layer that is in use is bound to its modules."""

    def __init__(
        self, records: LayerRecords, tiers: TierManager, ledger: Ledger, device: torch.device, slot_bytes: int
    ) -> None:
        """Raises `TierCapacityError` if the device has no room for the ring."""
        self._records, self._tiers, self._stack = records, tiers, ExitStack()
        chunks = booked(ledger, Tier.DEVICE, device_chunks(device))
        self._ring = open_ring(ledger, self._stack, Region.FETCH_SLOT, RING_SLOTS, slot_bytes, Tier.DEVICE, chunks)
        self._views: dict[int, list[Matrix]] = {}  # by slot
        self._here: dict[int, _Here] = {}  # by layer, the one that has rested longest first
        self._using: int | None = None

    def use(self, layer: int) -> None:
        """Let compute wait for the matrices of `layer`, and bind them.

        Raises:
            RecordLostError, TransferError: the layer's bytes are gone, or their copy failed.
        """
        if self._using == layer:
            return
        self.rest()
        if layer not in self._here:
            self._send(layer)
        try:
            self._here[layer].ticket.wait()
        except BaseException:
            self._give_back(layer)
            raise
        slot = self._here[layer].slot
        if slot.index not in self._views:
            self._views[slot.index] = self._records.matrices(slot.bytes)
        self._records.bind(layer, self._views[slot.index])
        self._using = layer

    def expect(self, layer: int) -> None:
        """Let `layer` set out, if there is a free slot."""
        if layer not in self._here and len(self._here) < RING_SLOTS:
            self._send(layer)

    def rest(self) -> None:
        """No layer is in use any more."""
        if self._using is not None:
            self._give_back(self._using)

    def empty(self) -> None:
        """Give back every slot."""
        for layer in list(self._here):
            self._give_back(layer)

    def abandon(self) -> None:
        """Unbind what is bound, and give the memory back, in whatever state a call was broken off. No copy is under
        way."""
        views = {id(matrix) for matrices in self._views.values() for matrix in matrices}
        for layer in range(self._records.layers):
            if any(id(matrix) in views for matrix in self._records.bound(layer)):
                self._records.unbind(layer)
        self.close()

    def close(self) -> None:
        self._stack.close()

    def _send(self, layer: int) -> None:
        """Let a layer set out for a slot. The layer that has rested longest gives its slot up if none is free."""
        slot = self._ring.acquire()
        if slot is None:
            self._give_back(next(iter(self._here)))
            slot = self._ring.acquire()
            assert slot is not None, "it was given back"
        to = slot.bytes[: self._records.nbytes].view(1, -1)
        self._here[layer] = _Here(slot, self._tiers.fetch([self._records.key(layer)], to, fence=slot.fence))

    def _give_back(self, layer: int) -> None:
        """The slot of `layer` may take another, once compute is done with it."""
        slot, ticket = self._here.pop(layer)
        ticket.close()
        if self._using == layer:
            self._using = None
            self._records.unbind(layer)
            self._tiers.used(slot.fence)
        slot.release()
