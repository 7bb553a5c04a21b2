"""The weights of a model that the device has no room for: the matrices of some layers pass through a ring.

Which layers are streamed is settled before each call; what is settled on the device again comes back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.layer_homes import LayerHomes
from tiered.forward.layer_record import LayerRecords
from tiered.forward.weight_bytes import WeightBytes
from tiered.kernels.coded_rows import CodedRows
from tiered.offload.device import synchronize
from tiered.offload.fence import Fence, Region
from tiered.offload.file_record import FileRecord
from tiered.offload.transport import Transport
from tiered.tiers.host_pool import HostPool
from tiered.tiers.parts import Wanted
from tiered.tiers.stats import TierStats
from tiered.tiers.tiers import Home


@dataclass(eq=False, slots=True)
class _Coming:
    """A record that is being filled. `missing`: rows of each matrix that are not there yet; `home`: None on the
    device."""

    bytes: UInt8[Tensor, " record"]
    missing: dict[str, int]
    home: Home | None = None


class StreamedWeights:
    """The weights of a model between the tiers. All of them are in the books of `ledger`, as `now` has them.

    `enter` goes before every use of a layer. A layer that is elsewhere has no matrices in the model: its use is then an
    error, never another layer's weights. A streamed layer is a record with its number as the key.

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
        self._homes: LayerHomes | None = None
        self._broken_off = False  # unless `rest` and `settle` get to their ends: Ctrl-C may come anywhere
        ledger.allocate({Account.WEIGHTS: now.resident})
        # Before anything is read: in between, tensors that are to be coded would leave gaps that no record fills.
        resident = [layer for layer in records.layers if layer not in now.layers]
        self._coming = {layer: _Coming(records.on_device(device).bytes, self._missing()) for layer in resident}
        if now.layers:
            self._open().open_ring()

    def held(self) -> dict[Tier, int]:
        """Bytes of each tier."""
        host, homes = self.now.lower(self._ledger.budget)[Tier.HOST], self._homes
        ring = homes is not None and homes.residency.opened  # not after a failure
        scratch = 0 if homes is None else homes.tiers.scratch_bytes
        here = sum(each.nbytes for each in self.now.buffers if ring or each.account is not Account.STAGING)
        return {Tier.DEVICE: here, Tier.HOST: sum(host.values()), Tier.DISK: scratch}

    def room(self, own: str, rows: slice | None = None) -> UInt8[Tensor, " nbytes"] | None:
        """Where the bytes of the weight that we call `own`, or of some of its rows, belong: in the record of its layer,
        on the device or in the host tier; None for a weight in no record."""
        found = self.records.find(own)
        if found is None:
            return None
        layer, name = found
        if layer in self.files and self._is_below(layer):  # it is read to be looked at alone
            return torch.empty(self.records.part_bytes(name, rows), dtype=torch.uint8)
        if layer not in self._coming:
            home = self._open().host_home()
            assert home.memory is not None, "it is in host memory"
            self._coming[layer] = _Coming(home.memory, self._missing(), home)
        return self.records.part(self._coming[layer].bytes, name, rows)

    def place(self, own: str, weight: Tensor | CodedRows, rows: slice | None = None) -> None:
        """The weight that we call `own` is there, or some of its rows, in their `room` if they have one."""
        found = self.records.find(own)
        if found is None:
            self.records.place(own, weight)
            return
        layer, name = found
        if layer in self.now.layers:
            self.records.place(own, None)
        if layer in self.files and self._is_below(layer):
            if layer not in self._open().residency:  # the first of its matrices: the files have all of them
                self._open().read(layer)
            return
        coming = self._coming[layer]
        coming.missing[name] -= self.records.rows(name) if rows is None else rows.stop - rows.start
        if coming.home is None and not coming.missing[name]:
            self.records.place(own, self.records.matrix(coming.bytes, name))
        if not any(coming.missing.values()):
            del self._coming[layer]
            if coming.home is not None:
                self._open().place(layer, coming.home)
            if self._is_below(layer):
                self._open().sink(layer)

    def settle(self, then: WeightBytes) -> None:
        """Stream the layers of `then`, as many of them from below the host. After a failure `now` says how far it came.

        Raises:
            TierCapacityError: a tier has no room for what comes to it.
            TransferError: a layer that is to come back does not.
        """
        if self._broken_off:
            self._recover()
        if then == self.now:
            return
        self._broken_off = True
        self.records.hide()
        before, room = self.now.layers, len(then.layers) - then.below
        try:
            homes = self._open()
            homes.residency.empty()
            for layer in (layer for layer in then.layers if layer not in before):
                self._leave(layer, room)
            if not then.layers:
                self._close_ring()
            for layer in (layer for layer in before if layer not in then.layers):
                self._return(layer)
            if len(then.layers) < len(before):
                synchronize(self._device)  # the next call may compute on another stream than those layers came to
            homes.make_room(room)
            here = homes.on_host
            below = [layer for layer in then.layers if layer not in here]
            for layer in below[: room - len(here)]:
                homes.lift(layer)
            if then.layers:
                homes.open_ring()
        finally:
            self.note()
        if not then.layers:
            homes.close()
            self._homes = None
        self._broken_off = False

    @spanned(Op.WEIGHTS)
    def enter(self, layer: int) -> None:
        """Let compute wait for the matrices of `layer`, if it is streamed, and send the next streamed layer.

        Raises:
            TransferError: a copy of the layer failed.
        """
        if not self.now.layers:
            return
        self._broken_off = True
        self.records.hide(other_than=layer)
        ahead = [Wanted(next((each for each in self.now.layers if each > layer), self.now.layers[0]))]
        residency = self._open().residency
        if layer in self.now.layers:
            self.records.show(layer, *residency.use([Wanted(layer)], ahead))
        else:
            residency.use([], ahead)

    def rest(self, *, failed: bool) -> None:
        """A call is over: no layer is in use. The next call may compute on another stream."""
        self.records.hide()
        if self._homes is not None:
            self._homes.residency.rest()
        self._broken_off = self._broken_off and failed

    def stats(self) -> TierStats | None:
        """What moved since `restart`; None if nothing is streamed."""
        return None if self._homes is None else self._homes.tiers.stats()

    def restart(self) -> None:
        """Count what moves anew."""
        if self._homes is not None:
            self._homes.tiers.restart_stats()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the books of the streamed layers contradict themselves."""
        if self._homes is not None:
            self._homes.check_integrity()
            there, here = self._homes.streamed, self._homes.on_host
            if there != list(self.now.layers) or len(there) - len(here) != self.now.below:
                raise RuntimeError(f"streamed: {self.now}; records of {there}, on the host {here}")

    def note(self) -> None:
        """Bring `now` and the books up to date. A layer on the device has no record."""
        streamed, here = [], []
        if self._homes is not None:
            for layer in filter(self.records.bound, self._homes.streamed):
                self._homes.residency.remove(layer)
            streamed, here = self._homes.streamed, self._homes.on_host
        self.now = replace(self.now, layers=tuple(streamed), below=len(streamed) - len(here))
        there, booked = self.now.resident, self._ledger.held(Tier.DEVICE, Account.WEIGHTS)
        self._ledger.allocate({Account.WEIGHTS: max(0, there - booked)})
        self._ledger.release({Account.WEIGHTS: max(0, booked - there)})

    def close(self) -> None:
        """Give everything back that lies below the device, and the ring. May be called again."""
        for coming in self._coming.values():
            if coming.home is not None:
                coming.home.free()
        self._coming.clear()
        self._close_ring()
        if self._homes is not None:
            self._homes.close()
        self._homes = None

    def _missing(self) -> dict[str, int]:
        return {name: self.records.rows(name) for name in self.records.names}

    def _leave(self, layer: int, room: int) -> None:
        """Move a layer down from the device, with at most `room` layers on the host."""
        homes = self._open()
        if layer in self.files and len(homes.on_host) >= room:
            homes.read(layer)
        else:
            homes.make_room(room - 1)
            home = homes.host_home()
            assert home.memory is not None, "it is in host memory"
            self.records.write(layer, home.memory)
            homes.place(layer, home)
        self.records.unbind(layer)
        self._ledger.release({Account.WEIGHTS: self.now.record})

    def _return(self, layer: int) -> None:
        """Bring a layer back to stay."""
        residency = self._open().residency
        self._ledger.allocate({Account.WEIGHTS: self.now.record})
        chunk = self.records.on_device(self._device)
        residency.copy_out(layer, chunk.bytes, Fence(Region.DEVICE_SLOT, chunk.earlier))
        self.records.assign(layer, chunk.bytes)
        residency.remove(layer)

    def _is_below(self, layer: int) -> bool:
        """Whether the host has no room for a layer that is about to be placed."""
        return layer in self.now.layers[: self.now.below]

    def _open(self) -> LayerHomes:
        """The tiers of the records, opened with the first one."""
        if self._homes is None:
            transport = None if self._transport is None else self._transport()
            self._homes = LayerHomes(self._ledger, self.pool, self._device, self.now, self.files, transport)
        return self._homes

    def _close_ring(self) -> None:
        self.records.forget_slots()
        if self._homes is not None:
            self._homes.close_ring()

    def _recover(self) -> None:
        """Begin anew after a call that was broken off, in whatever state it left the slots."""
        self.records.forget_slots()
        if self._homes is not None:
            self._homes.tiers.synchronize()
        self._close_ring()
        self.note()
        if self.now.layers:
            self._open().open_ring()
        elif self._homes is not None:
            self._homes.close()
            self._homes = None
        self._broken_off = False
