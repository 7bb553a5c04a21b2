"""The weights of a model that the device has no room for: matrices of layers, or experts, pass through slots.

Each call settles beforehand which layers are streamed; a layer that is resident again returns to the device.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.incoming_weights import IncomingWeights
from tiered.forward.streamed_experts import StreamedExperts
from tiered.forward.weight_bytes import WeightBytes
from tiered.forward.weight_homes import WeightHomes
from tiered.forward.weight_records import WeightRecords
from tiered.offload.device import synchronize
from tiered.offload.fence import Fence, Region
from tiered.offload.file_record import FileRecord
from tiered.offload.transport import Transport
from tiered.tiers.host_pool import HostPool
from tiered.tiers.parts import Wanted
from tiered.tiers.stats import TierStats


class StreamedWeights:
    """The weights of a model across the tiers. `ledger` has all of them, as `now` describes them.

    `enter` must precede every use of a layer. A layer that is not on the device has no matrices in the model. So using
    it is an error, and never reads another layer's weights. A streamed layer has the records of `WeightBytes.keys`.

    Attributes:
        records: the matrices of layers.
        now: the streamed layers.
        files: by key, the span of the checkpoint's files that equals a record.
        pool: source of host memory.
        experts: the streamed experts; None if layers are streamed.
    """

    def __init__(
        self,
        records: WeightRecords,
        ledger: Ledger,
        pool: HostPool,
        *,
        device: torch.device,
        now: WeightBytes,
        files: Mapping[Hashable, FileRecord],
        transport: Callable[[], Transport] | None,
    ) -> None:
        """Book the weights that `incoming` will add. `transport` makes the transport of copies; None for the device's.

        Raises:
            TierCapacityError: a tier has no room for them.
        """
        self.records, self.files, self.now, self.pool = records, files, now, pool
        self._ledger, self._device, self._transport = ledger, device, transport
        self._homes: WeightHomes | None = None
        self.experts = StreamedExperts(records, now) if now.experts else None
        self._broken_off = False  # False only after `rest` or `settle` finished: Ctrl-C may come anywhere
        ledger.allocate({Account.WEIGHTS: now.resident})
        if now.layers:
            self._open_slots()

    def incoming(self) -> IncomingWeights:
        """The weights while a checkpoint is read. Raises as `IncomingWeights`."""
        return IncomingWeights(self.records, self.now, self.files, self._open, self._device)

    def held(self) -> dict[Tier, int]:
        """Bytes of each tier."""
        host, homes = self.now.lower(self._ledger.budget)[Tier.HOST], self._homes
        ring = homes is not None and homes.residency.opened  # False after a failure
        scratch = 0 if homes is None else homes.tiers.scratch_bytes
        here = sum(each.nbytes for each in self.now.buffers if ring or each.account is not Account.STAGING)
        return {Tier.DEVICE: here, Tier.HOST: sum(host.values()), Tier.DISK: scratch}

    def settle(self, then: WeightBytes) -> None:
        """Stream the layers of `then`, with its number of records below the host. `now` is right even after a failure.

        Raises:
            TierCapacityError: a tier has no room for a layer or record that moves to it.
            TransferError: a copy of a layer that returns to the device failed.
        """
        if self._broken_off:
            self._recover()
        if then == self.now:
            return
        self._broken_off = True
        self.records.hide()
        before, room = self.now.layers, then.streamed - then.below
        try:
            homes = self._open()
            homes.residency.empty()
            if then.slots != self.now.slots:
                self._close_slots()
                self.now = replace(self.now, slots=then.slots)
            for layer in (layer for layer in then.layers if layer not in before):
                self._leave(layer, room)
            for layer in (layer for layer in before if layer not in then.layers):
                self._return(layer)
            if len(then.layers) < len(before):
                synchronize(self._device)  # the next call may compute on another stream than the copies ran on
            free = room - homes.make_room(room)
            here = {*homes.on_host} if free else set()
            below = [key for key in homes.layers if key not in here] if free else []
            for key in below[:free]:
                homes.lift(key)
            if then.layers:
                self._open_slots()
        finally:
            self.note()
        self._broken_off = False

    @spanned(Op.WEIGHTS)
    def enter(self, layer: int) -> None:
        """Let the compute stream wait for the matrices of `layer`, if it is streamed, and fetch the next streamed
        layer. Experts are fetched after their router has picked them.

        Raises:
            TransferError: a copy of the layer failed.
        """
        if not self.now.layers:
            return
        self._broken_off = True
        if self.experts is not None:
            return
        self.records.hide(other_than=layer)
        ahead = [Wanted(next((each for each in self.now.layers if each > layer), self.now.layers[0]))]
        residency = self._open().residency
        if layer in self.now.layers:
            self.records.show(layer, *residency.use([Wanted(layer)], ahead))
        else:
            residency.use([], ahead)

    def rest(self, *, failed: bool) -> None:
        """End a call: no layer is in use. The next call may compute on another stream."""
        self.records.hide()
        if self._homes is not None:
            self._homes.residency.rest()
        self._broken_off = self._broken_off and failed

    def stats(self) -> TierStats | None:
        """Transfers since `restart`; None if nothing is streamed."""
        return None if self._homes is None else self._homes.tiers.stats()

    def restart(self) -> None:
        """Reset the counts of transfers."""
        if self._homes is not None:
            self._homes.tiers.restart_stats()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the books of the streamed layers contradict themselves."""
        if self._homes is not None:
            self._homes.check_integrity()
            there, here = self._homes.layers, self._homes.on_host
            if tuple(dict.fromkeys(there.values())) != self.now.layers or len(there) - len(here) != self.now.below:
                raise RuntimeError(f"streamed: {self.now}; records of {there}, on the host {here}")

    def note(self) -> None:
        """Update `now` and the ledger. A layer on the device has no record, and without records nothing is kept below
        the device."""
        there: dict[Hashable, int] = {}
        here = 0
        if self._homes is not None:
            bound = {layer: self.records.bound(layer) for layer in self.records.layers}
            for key, layer in self._homes.layers.items():
                if bound[layer]:
                    self._homes.residency.remove(key)
            there, here = self._homes.layers, len(self._homes.on_host)
        layers = tuple(dict.fromkeys(there.values()))
        slots = self.now.slots if layers else 0
        self.now = replace(self.now, layers=layers, slots=slots, below=len(there) - here)
        resident, booked = self.now.resident, self._ledger.held(Tier.DEVICE, Account.WEIGHTS)
        self._ledger.allocate({Account.WEIGHTS: max(0, resident - booked)})
        self._ledger.release({Account.WEIGHTS: max(0, booked - resident)})
        if not layers:  # last, because copies that failed may be told here
            self._close_homes()

    def close(self) -> None:
        """Free the ring and all memory below the device. May be called again."""
        self._close_slots()
        self._close_homes()

    def _leave(self, layer: int, room: int) -> None:
        """Move a layer down from the device, with at most `room` records on the host."""
        homes = self._open()
        here = len(homes.on_host)
        for key in self.now.keys(layer):
            if key in self.files and here >= room:
                homes.read(key)
                continue
            if here >= room:
                here = homes.make_room(room - 1)
            home = homes.host_home()
            assert home.memory is not None, "it is in host memory"
            self.records.write(key, home.memory)
            homes.place(key, home)
            here += 1
        self.records.unbind(layer)
        self._ledger.release({Account.WEIGHTS: self.now.layer})

    def _return(self, layer: int) -> None:
        """Make a layer resident again."""
        residency = self._open().residency
        self._ledger.allocate({Account.WEIGHTS: self.now.layer})
        chunk = self.records.on_device(self._device)
        for key in self.now.keys(layer):
            fence = Fence(Region.DEVICE_SLOT, chunk.earlier)
            residency.copy_out(key, self.records.segments(key), chunk.bytes, fence)
        self.records.assign(layer, chunk.bytes)
        for key in self.now.keys(layer):
            residency.remove(key)

    def _open(self) -> WeightHomes:
        """The tiers of the records, opened with the first record."""
        if self._homes is None:
            transport = None if self._transport is None else self._transport()
            recurs = (lambda _: False) if self.experts is None else self.experts.recurs
            self._homes = WeightHomes(self._ledger, self.pool, self._device, self.now, self.files, transport, recurs)
        return self._homes

    def _open_slots(self) -> None:
        homes = self._open()
        homes.open_slots(self.now.slots)
        if self.experts is not None:
            self.experts.open(homes, self.now.slots)

    def _close_slots(self) -> None:
        self.records.forget_slots()
        if self.experts is not None:
            self.experts.close()
        if self._homes is not None:
            self._homes.close_slots()

    def _recover(self) -> None:
        """Reset the slots after a call that was broken off in any state."""
        self.records.forget_slots()
        if self._homes is not None:
            self._homes.tiers.synchronize()
        self._close_slots()
        self.note()
        if self.now.layers:
            self._open_slots()
        self._broken_off = False

    def _close_homes(self) -> None:
        if self._homes is not None:
            self._homes.close()
        self._homes = None
