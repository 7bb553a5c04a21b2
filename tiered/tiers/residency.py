"""Residency: records with homes below the device, and the slots of the device that they are used in.

    home in host memory ──FETCH──▶ slot ◀──▶ compute
      │  ▲ ▲                        │
      │  │ └──────────STORE─────────┘   what compute writes goes through to the home
      │  └──LOAD── home in a file       by way of a slot of host memory

Once a record is patched, its slot has no bytes that its home lacks: the record may leave the slot without a copy. The
caller's thread waits for no copy; compute and the transport's threads do (`Traffic`).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from tiered.core.events import Asked, Stored, TierEvent
from tiered.offload.copy_segments import Segment
from tiered.offload.fence import Fence
from tiered.offload.ring import Ring, RingSlot
from tiered.offload.transport import Copy, Lane
from tiered.tiers.parts import Equal, Layout, Parts, Wanted
from tiered.tiers.tiers import Home
from tiered.tiers.traffic import Traffic


@dataclass(eq=False, slots=True)
class _Record:
    """`filled`: parts that the home has bytes of; `layer`: of the model."""

    home: Home
    layout: Layout
    filled: Parts
    layer: int | None


@dataclass(eq=False, slots=True)
class _Here:
    """A record in a slot. `present`: parts that are there or on their way; `brought`: those of them that came from the
    home and were not written since; `written`: parts that were written and not patched; `arriving`: whether compute has
    to wait for copies."""

    slot: RingSlot
    present: Parts
    brought: Parts
    written: Parts
    arriving: bool = False


class Residency:
    """Records over the slots of a ring. Records may be placed before the slots open, and outlive them."""

    def __init__(self, traffic: Traffic, record: Callable[[TierEvent], None], passing: Ring | None = None) -> None:
        """`record` counts each event. `passing`: slots of host memory for records in files; None without files."""
        self._traffic, self._record, self._passing = traffic, record, passing
        self._slots: Ring | None = None
        self._records: dict[Hashable, _Record] = {}
        self._here: dict[Hashable, _Here] = {}  # the record unused for longest first
        self._using: set[Hashable] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def home(self, key: Hashable) -> Home:
        """The home of a record. Raises `KeyError` for no record."""
        return self._records[key].home

    def place(
        self, key: Hashable, home: Home, *, layout: Layout | None = None, filled: bool = True, layer: int | None = None
    ) -> None:
        """Add a record. Raises `ValueError` if there is one of that key.

        Args:
            key: name of the record.
            home: of its bytes.
            layout: of its parts; None for a single part.
            filled: whether the home has the bytes already; else `patch` brings them.
            layer: of the model, for figures by layer.
        """
        if key in self._records:
            raise ValueError(f"there is a record {key} already")
        layout = layout or Equal(home.nbytes)
        self._records[key] = _Record(home, layout, np.full(layout.parts, filled), layer)

    def move(self, key: Hashable, home: Home) -> None:
        """Give a record another home with the same bytes, and the former one back. Raises `KeyError` for no record."""
        record = self._records[key]
        former, record.home = record.home, home
        former.free()

    def remove(self, key: Hashable) -> None:
        """Forget a record and give its home back. Raises `KeyError` for no record."""
        self.drop(key)
        self._records.pop(key).home.free()

    @property
    def opened(self) -> bool:
        """Whether there are slots."""
        return self._slots is not None

    def open(self, slots: Ring) -> None:
        """Use records in `slots`."""
        self._slots = slots

    def use(self, wanted: Sequence[Wanted], ahead: Sequence[Wanted] = ()) -> list[UInt8[Tensor, " nbytes"]]:
        """Let compute wait for records, and send the records that are wanted next. Compute is done with all others.

        Args:
            wanted: distinct records, at most as many as there are slots.
            ahead: records that the next calls will want. A record that finds no slot stays in its home.

        Returns:
            The bytes of each record in its slot, valid until the next `use` without it.

        Raises:
            KeyError: no such record.
            TransferError: a copy failed. The records are dropped, and may be used again.
            ValueError: more records than slots.
        """
        self._traffic.harvest()
        keys = [each.key for each in wanted]
        for key in self._using.difference(keys):
            self._end_use(key)
        for each in wanted:
            self._send(each, keys)
            self._using.add(each.key)
        kept = [*keys, *(each.key for each in ahead)]
        for each in ahead:
            self._send(each, kept, needed=False)
        for key in keys:
            here = self._here[key]
            try:
                if here.arriving:
                    self._await(here.slot.fence, self._records[key].layer)
            except BaseException:
                self.drop(key)
                raise
            here.arriving = False
        return [self._here[key].slot.bytes[: self._records[key].home.nbytes] for key in keys]

    def write(self, key: Hashable, parts: Parts) -> None:
        """Let compute write bytes of a record in use, in `parts`. The other bytes of these parts are present, or were
        never written. `patch` follows before another record is used. Raises `KeyError` for a record without a slot."""
        here = self._here[key]
        here.present, here.brought, here.written = here.present | parts, here.brought & ~parts, here.written | parts
        self._traffic.compute(Lane.STORE, writes=[here.slot.fence], layer=self._records[key].layer)

    def patch(self, key: Hashable, segments: Iterable[Segment] | None = None) -> None:
        """Send `segments` of the slot home; None for all written parts. Raises `KeyError` if there is no slot."""
        here, record = self._here[key], self._records[key]
        home, slot, parts = record.home, here.slot, here.written
        assert home.memory is not None, "files are only read"
        record.filled |= parts
        here.written = np.zeros_like(parts)
        self._traffic.compute(Lane.STORE, writes=[slot.fence], layer=record.layer)
        segments = record.layout.segments(parts) if segments is None else segments
        copies = [Copy(to, at) for at, to in _pieces(home.memory, slot.bytes, segments)]
        # The home is read as well: after a copy that failed, it lacks bytes, so every later copy has to fail too.
        self._traffic.move(Lane.STORE, copies, reads=[slot.fence, home.fence], writes=[home.fence], layer=record.layer)
        nbytes = sum(copy.source.numel() for copy in copies)
        self._record(Stored(tier=home.tier, records=int(parts.sum()), nbytes=nbytes))

    def missing(self, wanted: Wanted) -> Parts:
        """The parts that a use would bring to a slot."""
        record, here = self._records[wanted.key], self._here.get(wanted.key)
        parts = record.filled if wanted.parts is None else record.filled & wanted.parts
        return parts if here is None else parts & ~here.present

    def brought(self, wanted: Wanted) -> Parts:
        """The parts that came to their slot from the home, or would come, and were not written since."""
        here, missing = self._here.get(wanted.key), self.missing(wanted)
        brought = np.zeros_like(missing) if here is None else here.brought
        return missing | (brought if wanted.parts is None else brought & wanted.parts)

    def copy_out(self, key: Hashable, into: UInt8[Tensor, " nbytes"], fence: Fence) -> None:
        """Bring a record to memory of the device that `fence` guards, and let compute wait for it. Errors as `use`."""
        record = self._records[key]
        self._fetch(record, record.filled, into, fence)
        self._await(fence, record.layer)

    def rest(self) -> None:
        """Compute is done with all records; the next `use` may come from another stream. Ended copies are counted."""
        for key in list(self._using):
            self._end_use(key)
        self._traffic.harvest()

    def drop(self, key: Hashable) -> None:
        """Let a record leave its slot, if it is in one."""
        if key in self._using:
            self._end_use(key)
        if (here := self._here.pop(key, None)) is not None:
            here.slot.release()

    def empty(self) -> None:
        """Let all records leave their slots."""
        for key in list(self._here):
            self.drop(key)

    def close_slots(self) -> None:
        """Forget the slots and the records in them, in whatever state a call was broken off. The caller frees them."""
        self._using.clear()
        while self._here:
            self._here.popitem()[1].slot.release()  # a ring and a held slot refer to each other
        self._slots = None

    def close(self) -> None:
        """Give all homes back."""
        self.close_slots()
        while self._records:
            self._records.popitem()[1].home.free()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where the books contradict themselves."""
        if self._slots is not None:
            self._slots.check_integrity()
            if self._slots.held != len(self._here):
                raise RuntimeError(f"{self._slots.held} slots are held, by {len(self._here)} records")
        if not self._using <= self._here.keys() <= self._records.keys():
            raise RuntimeError(f"in use {self._using}, in slots {set(self._here)}, of {set(self._records)}")
        for key, here in self._here.items():
            there = self._records[key].filled | here.written
            if (here.present & ~there).any() or (here.brought & ~here.present).any():
                raise RuntimeError(f"{key}: {here}, filled {self._records[key].filled}")
        if self._passing is not None:
            self._passing.check_integrity()

    def _send(self, wanted: Wanted, kept: Sequence[Hashable], *, needed: bool = True) -> None:
        """Give a record a slot, and send the missing parts there. No record of `kept` leaves its slot for it."""
        key, parts = wanted.key, self.missing(wanted)
        if not self._enter(key, kept):
            if needed:
                raise ValueError(f"{len(kept)} records are wanted at once: there are too few slots")
            return
        record, here = self._records[key], self._here[key]
        if parts.any():
            self._fetch(record, parts, here.slot.bytes, here.slot.fence)
            here.present |= parts
            here.brought |= parts
            here.arriving = True

    def _enter(self, key: Hashable, kept: Sequence[Hashable]) -> bool:
        """Whether a record has a slot now. The record that was unused for longest leaves its slot for it."""
        assert self._slots is not None, "what is used has slots"
        if key in self._here:
            self._here[key] = self._here.pop(key)
            return True
        slot = self._slots.acquire()
        if slot is None:
            leaving = next((other for other in self._here if other not in kept), None)
            if leaving is None:
                return False
            assert not self._here[leaving].written.any(), "what is written is patched before another record is used"
            self.drop(leaving)
            slot = self._slots.acquire()
            assert slot is not None, "it was given back"
        none = np.zeros(self._records[key].layout.parts, dtype=bool)
        self._here[key] = _Here(slot, none, none.copy(), none.copy())
        return True

    def _fetch(self, record: _Record, parts: Parts, into: Tensor, fence: Fence) -> None:
        home, passing = record.home, None
        source, guard = home.memory, home.fence
        segments = list(record.layout.segments(parts))
        try:
            if source is None:
                passing = None if self._passing is None else self._passing.acquire()
                assert passing is not None and home.read is not None, "what is in a file has a slot to pass"
                source, guard = passing.bytes[: home.nbytes], passing.fence
                work = partial(home.read, source)
                self._traffic.move(Lane.LOAD, work, reads=[home.fence], writes=[guard], layer=record.layer)
            copies = [Copy(at, to) for at, to in _pieces(source, into, segments)]
            # The slot is read as well: if a copy of other parts failed, this one must not say otherwise.
            self._traffic.move(Lane.FETCH, copies, reads=[guard, fence], writes=[fence], layer=record.layer)
        finally:
            if passing is not None:
                passing.release()
        self._record(Asked(tier=home.tier, records=int(parts.sum()), nbytes=sum(size for *_, size in segments)))

    def _await(self, fence: Fence, layer: int | None) -> None:
        """Let compute wait for the copies to these bytes."""
        event = self._traffic.compute(Lane.FETCH, reads=[fence], layer=layer)
        if event.done():
            event.synchronize()

    def _end_use(self, key: Hashable) -> None:
        """Let later copies to the slot wait for the work that compute has so far."""
        self._using.discard(key)
        fence, layer = self._here[key].slot.fence, self._records[key].layer
        self._traffic.compute(Lane.FETCH, reads=[fence], layer=layer)


def _pieces(home: Tensor, slot: Tensor, segments: Iterable[Segment]) -> list[tuple[Tensor, Tensor]]:
    return [(home[at : at + size], slot[to : to + size]) for at, to, size in segments]
