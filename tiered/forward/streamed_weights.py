"""The weights of a model that the device has no room for: the matrices of some layers pass through a ring of two slots.

One layer is used right where it has arrived, while the next one comes. Which layers those are is settled before each
call; what is settled on the device again comes back.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.weight_bytes import RING_SLOTS, WeightBytes
from tiered.kernels.coded_weight import CodedWeight
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import assign
from tiered.models.weight_form import WeightForm, places
from tiered.offload.arena import device_chunks
from tiered.offload.chunk import Chunk
from tiered.offload.device import synchronize
from tiered.offload.errors import ArenaFullError
from tiered.offload.fence import Fence, Region
from tiered.offload.file_record import FileRecord
from tiered.offload.ring import Ring, RingSlot
from tiered.offload.slabs import UNIT
from tiered.offload.transport import Transport
from tiered.tiers.host_pool import HostPool, booked
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_ring, open_tiers
from tiered.tiers.record_book import RecordKey
from tiered.tiers.stats import TierStats
from tiered.tiers.ticket import Ticket


class _Here(NamedTuple):
    """A layer in a slot of the ring, or on its way there: it is used once `ticket` was waited for."""

    slot: RingSlot
    ticket: Ticket


class StreamedWeights:
    """The weights of `model` between the tiers. All of them are in the books of `ledger`, as `now` has them.

    `enter` goes before every use of a layer. A layer that is elsewhere has no matrices in the model: using it all the
    same is an error, never another layer's weights.

    Attributes:
        form: how the weights are kept.
        now: which layers are streamed.
        files: by layer, where the checkpoint's files hold the very bytes of its record.
        pool: where host memory comes from.
    """

    def __init__(
        self,
        model: DiffusionModel,
        ledger: Ledger,
        pool: HostPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightForm,
        now: WeightBytes,
        files: Mapping[int, FileRecord],
        transport: Callable[[], Transport] | None = None,
    ) -> None:
        """The weights are about to come, by `place`: where they will be is booked here. `transport` makes what carries
        copies; None: by device.

        Raises:
            TierCapacityError: a tier has no room for them.
        """
        name = str(dtype).removeprefix("torch.")
        self.form, self.files, self.now = form, files, now
        self._model, self._ledger, self.pool, self._transport = model, ledger, pool, transport
        self._dtype, self._device = dtype, device
        self._places, self._record = places(model.shape, name, form)
        self._tiers: TierManager | None = None
        self._ring: Ring | None = None
        self._of_tiers, self._of_ring = ExitStack(), ExitStack()
        # By layer, what has its matrices; by slot of the ring, the matrices that it is.
        self._owners = [[getattr(block, each) for each in self._places] for block in model.blocks]
        self._views: dict[int, list[Tensor | CodedWeight]] = {}
        self._here: dict[int, _Here] = {}  # the layer that has rested longest first
        self._using: int | None = None
        self._broken_off = False  # unless `rest` and `settle` get to their ends: Ctrl-C may come anywhere
        # Records that are being filled, and the names of matrices that are not there yet.
        self._coming: dict[int, tuple[UInt8[Tensor, " record"], set[str]]] = {}
        ledger.allocate({Account.WEIGHTS: now.device[Account.WEIGHTS]})
        # Before anything is read: in between, tensors that are to be coded would leave gaps that no record fills.
        resident = [layer for layer in range(model.shape.layers) if layer not in now.layers]
        self._coming = {layer: (self._on_device().bytes, set(self._places)) for layer in resident}
        if now.layers:
            self._open_ring()

    def held(self) -> dict[Tier, int]:
        """Bytes of each tier."""
        lower = self.now.lower(self._ledger.budget)
        return {Tier.DEVICE: sum(self.now.device.values())} | {tier: sum(lower[tier].values()) for tier in lower}

    def may_be_coded(self, own: str) -> bool:
        """Whether the weight that we call `own` is in the form's code, if it has one."""
        in_record = self._of_record(own)[0] is not None
        return in_record or (self.form.head and own in ("wte.weight", "ff_out.weight"))

    def room(self, own: str) -> UInt8[Tensor, " nbytes"] | None:
        """Where the bytes of the weight that we call `own` belong: in the record of its layer, on the device or in the
        host tier; None: it is in no record."""
        layer, name = self._of_record(own)
        if layer is None:
            return None
        start, nbytes = self._places[name]
        if layer in self.files and self._is_below(layer):  # it is read to be looked at alone
            return torch.empty(nbytes, dtype=torch.uint8)
        if layer not in self._coming:
            self._coming[layer] = self._manager.reserve(self._key(layer), self._record), set(self._places)
        return self._coming[layer][0][start : start + nbytes]

    def place(self, own: str, weight: Tensor | CodedWeight) -> None:
        """The weight that we call `own` is there, in its `room` if it has one."""
        layer, name = self._of_record(own)
        streamed = layer is not None and layer in self.now.layers
        assign(self._model, own, None if streamed else weight)
        if layer is None:
            return
        if layer in self.files and self._is_below(layer):
            if self._key(layer) not in self._manager:  # the first of its matrices: the files have all of them
                self._sink(layer)
            return
        missing = self._coming[layer][1]
        missing.discard(name)
        if not missing:
            del self._coming[layer]
            if streamed:
                self._manager.commit(self._key(layer))
            if self._is_below(layer):
                self._sink(layer)

    def settle(self, then: WeightBytes) -> None:
        """Let those layers be streamed that `then` says, and as many of them lie below the host. If that fails, `now`
        says how far it came.

        Raises:
            TierCapacityError: a tier has no room for what comes to it.
            RecordLostError, TransferError: a layer that is to come back does not.
        """
        if self._broken_off:
            self._recover()
        if then == self.now:
            return
        self._broken_off = True
        self._empty()
        before, room = self.now.layers, len(then.layers) - then.below
        try:
            for layer in (layer for layer in then.layers if layer not in before):
                self._leave(layer, room)
            if not then.layers:
                self._of_ring.close()
                self._ring = None
                self._views.clear()
            for layer in (layer for layer in before if layer not in then.layers):
                self._return(layer)
            if len(then.layers) < len(before):
                synchronize(self._device)  # the next call may compute on another stream than those layers came to
            self._make_room(room)
            if then.layers:
                here = self._on_host()
                below = [self._key(layer) for layer in then.layers if layer not in here]
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
        """`layer` is about to be used, and the one before it no more: let compute wait for its matrices where they are
        streamed, and the next streamed layer set out.

        Raises:
            RecordLostError, TransferError: the layer's bytes are gone, or their copy failed.
        """
        if not self.now.layers:
            return
        self._broken_off = True
        if self._using is not None and self._using != layer:
            self._give_back(self._using)
        if layer in self.now.layers and self._using != layer:
            if layer not in self._here:
                self._send(layer)
            try:
                self._here[layer].ticket.wait()
            except BaseException:
                self._give_back(layer)
                raise
            slot = self._here[layer].slot
            if slot.index not in self._views:
                self._views[slot.index] = self._matrices(slot.bytes)
            # Right into their attributes: a module takes its time for a parameter, and there is one for every forward.
            for owner, weight in zip(self._owners[layer], self._views[slot.index], strict=True):
                vars(owner)["weight"] = weight
            self._using = layer
        after = next((each for each in self.now.layers if each > layer), self.now.layers[0])
        if after not in self._here and len(self._here) < RING_SLOTS:
            self._send(after)

    def rest(self, *, failed: bool) -> None:
        """A call is over: no layer is in use. The next call may compute on another stream, whose end would not say
        when this one's last use has ended."""
        if self._using is not None:
            self._give_back(self._using)
        self._broken_off = self._broken_off and failed

    def stats(self) -> TierStats | None:
        """What moved since `restart`; None: nothing is streamed."""
        return None if self._tiers is None else self._tiers.stats()

    def restart(self) -> None:
        """Count what moves anew."""
        if self._tiers is not None:
            self._tiers.restart_stats()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where the books of the streamed layers contradict themselves."""
        if self._tiers is not None:
            self._tiers.check_integrity()
            there = [key.layer for key in self._keys()]
            if there != list(self.now.layers) or len(there) - len(self._on_host()) != self.now.below:
                raise RuntimeError(f"streamed: {self.now}; records of {there}, on the host {self._on_host()}")

    def close(self) -> None:
        """Give everything back that lies below the device, and the ring. May be called again."""
        self._empty()
        self._of_ring.close()
        self._of_tiers.close()
        self._tiers = self._ring = None
        self._coming.clear()

    @property
    def _manager(self) -> TierManager:
        """Of the records of all layers, as long as there are any."""
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
        chunks = booked(self._ledger, Tier.DEVICE, device_chunks(self._device))
        slot, stack = self.now.slot_bytes, self._of_ring
        self._ring = open_ring(self._ledger, stack, Region.FETCH_SLOT, RING_SLOTS, slot, Tier.DEVICE, chunks)

    def _send(self, layer: int) -> None:
        """Let a layer set out for a slot, which another gives up where none is free."""
        assert self._ring is not None, "what is streamed has a ring"
        slot = self._ring.acquire()
        if slot is None:
            self._give_back(next(iter(self._here)))
            slot = self._ring.acquire()
            assert slot is not None, "it was given back"
        to = slot.bytes[: self._record].view(1, -1)
        self._here[layer] = _Here(slot, self._manager.fetch([self._key(layer)], to, fence=slot.fence))

    def _give_back(self, layer: int) -> None:
        """The slot of `layer` may take another, once compute is done with it."""
        slot, ticket = self._here.pop(layer)
        ticket.close()
        if self._using == layer:
            self._using = None
            self._unbind(layer)
            self._manager.used(slot.fence)
        slot.release()

    def _empty(self) -> None:
        """No slot of the ring is held."""
        for layer in list(self._here):
            self._give_back(layer)

    def _leave(self, layer: int, room: int) -> None:
        """Take a layer from the device down, with at most `room` layers on the host."""
        key = self._key(layer)
        if layer in self.files and len(self._on_host()) >= room:
            self._manager.adopt(key, self.files[layer])
        else:
            self._make_room(room - 1)
            record = self._manager.reserve(key, self._record)
            for name in self._places:
                self._copy(getattr(self._model.blocks[layer], name).weight, record, name)
            self._manager.commit(key)
        self._unbind(layer)
        self._ledger.release({Account.WEIGHTS: self.now.record})

    def _return(self, layer: int) -> None:
        """Bring a layer back to stay."""
        self._ledger.allocate({Account.WEIGHTS: self.now.record})
        chunk = self._on_device()
        fence = Fence(Region.DEVICE_SLOT, chunk.earlier)
        self._manager.fetch([self._key(layer)], chunk.bytes.view(1, -1), fence=fence).wait()
        for name, weight in zip(self._places, self._matrices(chunk.bytes), strict=True):
            assign(self._model, f"blocks.{layer}.{name}.weight", weight)
        self._manager.forget([self._key(layer)])

    def _on_device(self) -> Chunk:
        """Memory for the record of a layer that stays.

        Raises:
            TierCapacityError: the device has none.
        """
        try:
            return device_chunks(self._device)(self._record)
        except ArenaFullError as error:
            raise TierCapacityError(error.needed, error.available, Tier.DEVICE, str(error)) from error

    def _sink(self, layer: int) -> None:
        """Let the record of a layer leave host memory."""
        if layer in self.files:
            self._manager.adopt(self._key(layer), self.files[layer])
        else:
            self._manager.evict([self._key(layer)])

    def _make_room(self, room: int) -> None:
        """Let records leave host memory until at most `room` are there."""
        here = self._on_host()
        while len(here) > room:
            self._sink(here.pop())

    def _is_below(self, layer: int) -> bool:
        """Whether the host has no room for a layer that is about to be placed."""
        return layer in self.now.layers[: self.now.below]

    def _on_host(self) -> list[int]:
        """The streamed layers whose records are in host memory."""
        return [key.layer for key in self._keys() if self._manager.holds(key, Tier.HOST)]

    def note(self) -> None:
        """Let `now` and the books say what there is. A layer on the device has no record; memory without records goes
        back."""
        for key in self._keys():
            if self._owners[key.layer][0].weight is not None:
                self._manager.forget([key])
        streamed = [key.layer for key in self._keys()]
        self.now = replace(self.now, layers=tuple(streamed), below=len(streamed) - len(self._on_host()))
        there, booked = self.now.device[Account.WEIGHTS], self._ledger.held(Tier.DEVICE, Account.WEIGHTS)
        self._ledger.allocate({Account.WEIGHTS: max(0, there - booked)})
        self._ledger.release({Account.WEIGHTS: max(0, booked - there)})
        if self._tiers is not None:
            self._tiers.trim()

    def _recover(self) -> None:
        """Nothing is under way, in whatever state a call was broken off."""
        if self._tiers is not None:
            self._tiers.close_tickets()
            self._tiers.synchronize()
        views = {id(weight) for matrices in self._views.values() for weight in matrices}
        for layer, owners in enumerate(self._owners):
            if any(id(owner.weight) in views for owner in owners):
                self._unbind(layer)
        self._here.clear()
        self._views.clear()
        self._using = None
        self._of_ring.close()
        self._ring = None
        self.note()
        if self.now.layers:
            self._open_ring()
        self._broken_off = False

    def _matrices(self, record: UInt8[Tensor, " record"]) -> list[Tensor | CodedWeight]:
        """The matrices of the layer that stands in `record`."""
        found, code = [], self.form.code
        for name, (start, nbytes) in self._places.items():
            out, inner = self._model.shape.matrices[name]
            stored = record[start : start + nbytes]
            if code is None:
                found.append(stored.view(self._dtype).view(out, inner))
            else:
                found.append(CodedWeight(stored.view(out, -1), code, inner, self._dtype))
        return found

    def _of_record(self, own: str) -> tuple[int | None, str]:
        """The layer whose record has the weight that we call `own`, None: no record has it; and its name there."""
        root, _, rest = own.partition(".")
        layer, _, name = rest.removesuffix(".weight").partition(".")
        return (int(layer), name) if root == "blocks" and name in self._places else (None, own)

    def _unbind(self, layer: int) -> None:
        for owner in self._owners[layer]:
            owner._parameters.pop("weight", None)
            vars(owner)["weight"] = None

    def _copy(self, weight: Tensor | CodedWeight, record: UInt8[Tensor, " record"], name: str) -> None:
        start, nbytes = self._places[name]
        stored = weight.bytes if isinstance(weight, CodedWeight) else weight.detach().view(torch.uint8)
        record[start : start + nbytes].copy_(stored.flatten())

    def _keys(self) -> list[RecordKey]:
        """Of the streamed layers, ascending."""
        keys = map(self._key, range(self.now.of_layers))
        return [] if self._tiers is None else [key for key in keys if key in self._tiers]

    @staticmethod
    def _key(layer: int) -> RecordKey:
        return RecordKey(Account.WEIGHTS, layer, 0, 0)
