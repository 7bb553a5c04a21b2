"""The weights of a model that the device has no room for: the matrices of some layers pass through a ring.

Which layers are streamed is settled before each call; what is settled on the device again comes back.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.layer_record import LayerRecords
from tiered.forward.layer_ring import LayerRing
from tiered.forward.weight_bytes import WeightBytes
from tiered.kernels.coded_rows import CodedRows
from tiered.offload.device import synchronize
from tiered.offload.fence import Fence, Region
from tiered.offload.file_record import FileRecord
from tiered.offload.slabs import UNIT
from tiered.offload.transport import Transport
from tiered.tiers.host_pool import HostPool
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_tiers
from tiered.tiers.record_book import RecordKey
from tiered.tiers.stats import TierStats


class StreamedWeights:
    """The weights of a model between the tiers. All of them are in the books of `ledger`, as `now` has them.

    `enter` goes before every use of a layer. A layer that is elsewhere has no matrices in the model: its use is then an
    error, never another layer's weights.

    Attributes:
        records: the matrices of layers.
        now: which layers are streamed.
        files: by layer, where the checkpoint's files hold the very bytes of its record.
        pool: where host memory comes from.
    """

    def __init__(
        self,
        records: LayerRecords,
        ledger: Ledger,
        pool: HostPool,
        *,
        device: torch.device,
        now: WeightBytes,
        files: Mapping[int, FileRecord],
        transport: Callable[[], Transport] | None = None,
    ) -> None:
        """Book the room of weights that are about to come, by `place`. `transport` makes what carries copies; None for
        that of the device.

        Raises:
            TierCapacityError: a tier has no room for them.
        """
        self.records, self.files, self.now, self.pool = records, files, now, pool
        self._ledger, self._device, self._transport = ledger, device, transport
        self._tiers: TierManager | None = None
        self._ring: LayerRing | None = None
        self._of_tiers = ExitStack()
        self._broken_off = False  # unless `rest` and `settle` get to their ends: Ctrl-C may come anywhere
        # Records that are being filled, and the names of matrices that are not there yet.
        self._coming: dict[int, tuple[UInt8[Tensor, " record"], set[str]]] = {}
        ledger.allocate({Account.WEIGHTS: now.device[Account.WEIGHTS]})
        # Before anything is read: in between, tensors that are to be coded would leave gaps that no record fills.
        resident = [layer for layer in range(records.layers) if layer not in now.layers]
        self._coming = {layer: (records.on_device(device).bytes, set(records.names)) for layer in resident}
        if now.layers:
            self._open_ring()

    def held(self) -> dict[Tier, int]:
        """Bytes of each tier."""
        lower = self.now.lower(self._ledger.budget)
        return {Tier.DEVICE: sum(self.now.device.values())} | {tier: sum(lower[tier].values()) for tier in lower}

    def room(self, own: str) -> UInt8[Tensor, " nbytes"] | None:
        """Where the bytes of the weight that we call `own` belong: in the record of its layer, on the device or in the
        host tier; None for a weight in no record."""
        found = self.records.find(own)
        if found is None:
            return None
        layer, name = found
        if layer in self.files and self._is_below(layer):  # it is read to be looked at alone
            return torch.empty(self.records.part_bytes(name), dtype=torch.uint8)
        if layer not in self._coming:
            record = self._manager.reserve(self.records.key(layer), self.records.nbytes)
            self._coming[layer] = record, set(self.records.names)
        return self.records.part(self._coming[layer][0], name)

    def place(self, own: str, weight: Tensor | CodedRows) -> None:
        """The weight that we call `own` is there, in its `room` if it has one."""
        found = self.records.find(own)
        streamed = found is not None and found[0] in self.now.layers
        self.records.place(own, None if streamed else weight)
        if found is None:
            return
        layer, name = found
        if layer in self.files and self._is_below(layer):
            if self.records.key(layer) not in self._manager:  # the first of its matrices: the files have all of them
                self._sink(layer)
            return
        missing = self._coming[layer][1]
        missing.discard(name)
        if not missing:
            del self._coming[layer]
            if streamed:
                self._manager.commit(self.records.key(layer))
            if self._is_below(layer):
                self._sink(layer)

    def settle(self, then: WeightBytes) -> None:
        """Stream the layers of `then`, as many of them from below the host. After a failure `now` says how far it came.

        Raises:
            TierCapacityError: a tier has no room for what comes to it.
            RecordLostError, TransferError: a layer that is to come back does not.
        """
        if self._broken_off:
            self._recover()
        if then == self.now:
            return
        self._broken_off = True
        if self._ring is not None:
            self._ring.empty()
        before, room = self.now.layers, len(then.layers) - then.below
        try:
            for layer in (layer for layer in then.layers if layer not in before):
                self._leave(layer, room)
            if not then.layers:
                self._close_ring()
            for layer in (layer for layer in before if layer not in then.layers):
                self._return(layer)
            if len(then.layers) < len(before):
                synchronize(self._device)  # the next call may compute on another stream than those layers came to
            self._make_room(room)
            if then.layers:
                here = self._on_host()
                below = [self.records.key(layer) for layer in then.layers if layer not in here]
                self._manager.load(below[: room - len(here)])
                if self._ring is None:
                    self._open_ring()
        finally:
            self.note()
        if not then.layers:
            self._of_tiers.close()
            self._tiers = None
        self._broken_off = False

    @spanned(Op.WEIGHTS)
    def enter(self, layer: int) -> None:
        """Let compute wait for the matrices of `layer`, if it is streamed, and send the next streamed layer.

        Raises:
            RecordLostError, TransferError: the layer's bytes are gone, or their copy failed.
        """
        if not self.now.layers:
            return
        assert self._ring is not None, "what is streamed has a ring"
        self._broken_off = True
        if layer in self.now.layers:
            self._ring.use(layer)
        else:
            self._ring.rest()
        self._ring.expect(next((each for each in self.now.layers if each > layer), self.now.layers[0]))

    def rest(self, *, failed: bool) -> None:
        """A call is over: no layer is in use. The next call may compute on another stream."""
        if self._ring is not None:
            self._ring.rest()
        self._broken_off = self._broken_off and failed

    def stats(self) -> TierStats | None:
        """What moved since `restart`; None if nothing is streamed."""
        return None if self._tiers is None else self._tiers.stats()

    def restart(self) -> None:
        """Count what moves anew."""
        if self._tiers is not None:
            self._tiers.restart_stats()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the books of the streamed layers contradict themselves."""
        if self._tiers is not None:
            self._tiers.check_integrity()
            there = [key.layer for key in self._keys()]
            if there != list(self.now.layers) or len(there) - len(self._on_host()) != self.now.below:
                raise RuntimeError(f"streamed: {self.now}; records of {there}, on the host {self._on_host()}")

    def close(self) -> None:
        """Give everything back that lies below the device, and the ring. May be called again."""
        if self._ring is not None:
            self._ring.empty()
        self._close_ring()
        self._of_tiers.close()
        self._tiers = None
        self._coming.clear()

    @property
    def _manager(self) -> TierManager:
        """The tiers of all records, opened with the first one."""
        if self._tiers is None:
            slot = self.now.slot_bytes
            self._tiers = self._of_tiers.enter_context(
                open_tiers(
                    self._ledger, device=self._device, dtype=torch.uint8,
                    transport=None if self._transport is None else self._transport(), pool=self.pool,
                    slot_bytes=UNIT, slab_bytes=slot, fetch_slots=1, store_slots=1,
                    load_bytes=slot if self.now.passes_host(self._ledger.budget) else None, promote=False,
                )
            )  # fmt: skip
        return self._tiers

    def _open_ring(self) -> None:
        self._ring = LayerRing(self.records, self._manager, self._ledger, self._device, self.now.slot_bytes)

    def _close_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
        self._ring = None

    def _leave(self, layer: int, room: int) -> None:
        """Move a layer down from the device, with at most `room` layers on the host."""
        key = self.records.key(layer)
        if layer in self.files and len(self._on_host()) >= room:
            self._manager.adopt(key, self.files[layer])
        else:
            self._make_room(room - 1)
            self.records.write(layer, self._manager.reserve(key, self.records.nbytes))
            self._manager.commit(key)
        self.records.unbind(layer)
        self._ledger.release({Account.WEIGHTS: self.now.record})

    def _return(self, layer: int) -> None:
        """Bring a layer back to stay."""
        self._ledger.allocate({Account.WEIGHTS: self.now.record})
        chunk = self.records.on_device(self._device)
        fence = Fence(Region.DEVICE_SLOT, chunk.earlier)
        self._manager.fetch([self.records.key(layer)], chunk.bytes.view(1, -1), fence=fence).wait()
        self.records.assign(layer, chunk.bytes)
        self._manager.forget([self.records.key(layer)])

    def _sink(self, layer: int) -> None:
        """Let the record of a layer leave host memory."""
        if layer in self.files:
            self._manager.adopt(self.records.key(layer), self.files[layer])
        else:
            self._manager.evict([self.records.key(layer)])

    def _make_room(self, room: int) -> None:
        """Let records leave host memory until at most `room` are there."""
        here = self._on_host()
        while len(here) > room:
            self._sink(here.pop())

    def _is_below(self, layer: int) -> bool:
        """Whether the host has no room for a layer that is about to be placed."""
        return layer in self.now.layers[: self.now.below]

    def _on_host(self) -> list[int]:
        """Streamed layers whose records are in host memory."""
        return [key.layer for key in self._keys() if self._manager.holds(key, Tier.HOST)]

    def note(self) -> None:
        """Bring `now` and the books up to date. A layer on the device has no record; spare memory goes."""
        for key in self._keys():
            if self.records.bound(key.layer):
                self._manager.forget([key])
        streamed = [key.layer for key in self._keys()]
        self.now = replace(self.now, layers=tuple(streamed), below=len(streamed) - len(self._on_host()))
        there, booked = self.now.device[Account.WEIGHTS], self._ledger.held(Tier.DEVICE, Account.WEIGHTS)
        self._ledger.allocate({Account.WEIGHTS: max(0, there - booked)})
        self._ledger.release({Account.WEIGHTS: max(0, booked - there)})
        if self._tiers is not None:
            self._tiers.trim()

    def _recover(self) -> None:
        if self._tiers is not None:
            self._tiers.close_tickets()
            self._tiers.synchronize()
        if self._ring is not None:
            self._ring.abandon()
        self._ring = None
        self.note()
        if self.now.layers:
            self._open_ring()
        self._broken_off = False

    def _keys(self) -> list[RecordKey]:
        keys = map(self.records.key, range(self.now.of_layers))
        return [] if self._tiers is None else [key for key in keys if key in self._tiers]
