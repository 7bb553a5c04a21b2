"""Records on their way: encoded into a staging slot and sent down, brought up into one and decoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from tiered.core.features import Account
from tiered.core.ledger import Ledger
from tiered.offload.arena import Slot
from tiered.offload.copy_segments import merge_neighbours
from tiered.offload.fence import Fence, Region
from tiered.offload.ring import Ring, RingSlot
from tiered.offload.transport import Copy, Lane, TransferEvent
from tiered.tiers.batches import Batch
from tiered.tiers.coding import decoding, encoding
from tiered.tiers.record_book import Entry
from tiered.tiers.traffic import Traffic


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a record lies in host memory: `room` bytes from `start` of `buffer`."""

    buffer: UInt8[Tensor, " bytes"]
    start: int
    room: int
    fence: Fence

    @classmethod
    def of(cls, slot: Slot) -> "_Span":
        return cls(slot.chunk.bytes, slot.start, slot.room_bytes, slot.fence)

    @property
    def order(self) -> tuple[int, int]:
        return id(self.buffer), self.start


class Rings(NamedTuple):
    """Staging slots.

    Attributes:
        store, fetch: slots of the device that records leave from, and arrive in.
    """

    store: Ring
    fetch: Ring


class Shipping:
    """Takes entries that have room from rows to bytes, and batches of entries from bytes to rows.

    A staging slot holds records in the order of their host slots, each in as much room as it has there; so records
    that are neighbours in host memory are neighbours in the slot, and one copy moves them all.
    """

    def __init__(
        self,
        traffic: Traffic,
        rings: Rings,
        ledger: Ledger,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`device`, `dtype`: device and dtype of the rows."""
        self.device = device
        self.dtype = dtype
        self.slot_bytes = rings.fetch.slot_bytes
        self._traffic = traffic
        self._rings = rings
        self._ledger = ledger

    @property
    def free_slots(self) -> int:
        """Staging slots that a batch could set out in."""
        return self._rings.fetch.slots - self._rings.fetch.held

    def check_integrity(self, arriving: int) -> None:
        """Raise `RuntimeError` if the rings' books contradict themselves, or if not `arriving` batches hold the slots
        that records arrive in."""
        for ring in self._rings:
            ring.check_integrity()
        if self._rings.fetch.held != arriving:
            raise RuntimeError(f"{self._rings.fetch.held} staging slots are held, by {arriving} batches")

    def encode_on_device(self, entries: Sequence[Entry], rows: Float[Tensor, "rows width"]) -> None:
        """Encode `rows` into the device slots of `entries`."""
        first = [0, *accumulate(entry.form.rows for entry in entries)]
        slots = [entry.memory for entry in entries]
        for _, group in groupby(range(len(entries)), key=lambda number: id(slots[number].chunk)):
            numbers = list(group)
            part = slice(numbers[0], numbers[-1] + 1)
            work = encoding(
                entries[part],
                rows[first[part.start] : first[part.stop]],
                slots[part.start].chunk.bytes,
                [slot.start for slot in slots[part]],
            )
            fences = [slot.fence for slot in slots[part]]
            self._traffic.compute(Lane.STORE, work, writes=fences, layer=_layer_of(entries[part]))

    def send_down(self, entries: Sequence[Entry], rows: Float[Tensor, "rows width"]) -> None:
        """Encode `rows` into a staging slot and copy that to the host slots of `entries`."""
        staging = self._rings.store.acquire()
        assert staging is not None, "a store gives its slot back before it returns"
        try:
            spans = [_Span.of(entry.memory) for entry in entries]
            offsets = _offsets(spans)
            work = encoding(entries, rows, staging.bytes, offsets)
            layer = _layer_of(entries)
            self._traffic.compute(Lane.STORE, work, writes=[staging.fence], layer=layer)
            self._traffic.move(
                Lane.STORE,
                [Copy(device, host) for host, device in _pieces(spans, offsets, staging)],
                reads=[staging.fence],
                writes=[span.fence for span in spans],
                layer=layer,
            )
        finally:
            staging.release()

    def send_up(self, batch: Batch) -> None:
        """Copy the batch's records to a staging slot, of which one is free."""
        staging = self._rings.fetch.acquire()
        assert staging is not None, "a batch sets out when a slot is free"
        try:
            spans = [_Span.of(entry.memory) for entry in batch.entries]
            offsets = _offsets(spans)
            batch.arrival = self._traffic.move(
                Lane.FETCH,
                [Copy(host, device) for host, device in _pieces(spans, offsets, staging)],
                reads=[span.fence for span in spans],
                writes=[staging.fence],
                layer=_layer_of(batch.entries),
            )
        except BaseException:
            staging.release()
            raise
        batch.slot, batch.buffer, batch.offsets, batch.fences = staging, staging.bytes, offsets, [staging.fence]

    def decode(self, batch: Batch) -> TransferEvent:
        """Decode a batch to its destination; it may not be decoded again, its staging slot is given back."""
        try:
            work, layer = decoding(batch, self.dtype), _layer_of(batch.entries)
            return self._traffic.compute(Lane.FETCH, work, reads=batch.fences, layer=layer)
        finally:
            self.give_back(batch)

    def set_aside(self, batch: Batch) -> None:
        """Give the staging slot of a batch back: its bytes go to memory of their own.

        Raises:
            TierCapacityError: the device has no room for them.
        """
        assert batch.slot is not None, "a batch that is set aside has a slot"
        staged, nbytes = batch.slot.bytes, batch.slot.bytes.numel()
        hint = "wait for tickets of records before they are replaced, say where their rows go, or raise the budget"
        self._ledger.allocate({Account.STAGING: nbytes}, hint=hint)
        batch.aside = nbytes
        aside, fence = torch.empty_like(staged), Fence(Region.FETCH_SLOT)

        def work() -> None:
            aside.copy_(staged)

        self._traffic.compute(Lane.FETCH, work, reads=batch.fences, writes=[fence])
        batch.slot.release()
        batch.slot, batch.buffer, batch.fences = None, aside, [fence]

    def give_back(self, batch: Batch) -> None:
        """The batch will not be decoded (any more) from where it is."""
        if batch.slot is not None:
            batch.slot.release()
        self._ledger.release({Account.STAGING: batch.aside})
        batch.slot, batch.buffer, batch.aside = None, None, 0


def _layer_of(entries: Sequence[Entry]) -> int | None:
    """The layer of the records; None where they are of several."""
    layers = {entry.key.layer for entry in entries}
    return layers.pop() if len(layers) == 1 else None


def _offsets(spans: Sequence[_Span]) -> list[int]:
    """First byte of each record in a staging slot, which keeps them in the order of host memory."""
    offsets, end = [0] * len(spans), 0
    for number in sorted(range(len(spans)), key=lambda number: spans[number].order):
        offsets[number], end = end, end + spans[number].room
    return offsets


def _pieces(spans: Sequence[_Span], offsets: Sequence[int], staging: RingSlot) -> Iterator[tuple[Tensor, Tensor]]:
    """The same bytes in host memory and in the staging slot, in as few pieces as possible."""
    pairs = sorted(zip(spans, offsets, strict=True), key=lambda pair: pair[1])
    for _, group in groupby(pairs, key=lambda pair: id(pair[0].buffer)):
        members = list(group)
        buffer = members[0][0].buffer
        for start, offset, size in merge_neighbours((span.start, offset, span.room) for span, offset in members):
            yield buffer[start : start + size], staging.bytes[offset : offset + size]
