"""Residency: records with homes below the device, and the device slots in which they are used.

    home in host memory ──FETCH──▶ slot ◀──▶ compute
      │  ▲ ▲                        │
      │  │ └──────────STORE─────────┘   writes of compute go through to the home
      │  └──LOAD── home in a file       by way of a slot of host memory

After a patch the home has all bytes of the slot, so the record may leave the slot without a copy. The caller's thread
waits for no copy; compute and the transport's threads do (`Traffic`).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from tiered.core.events import Stored, TierEvent
from tiered.offload.copy_segments import Segment
from tiered.offload.fence import Fence
from tiered.offload.ring import Ring, RingSlot
from tiered.offload.transport import Copy, Lane
from tiered.tiers.fetch import Fetch, Fetcher
from tiered.tiers.parts import Equal, Layout, Parts, Wanted
from tiered.tiers.tiers import Home
from tiered.tiers.traffic import Traffic


@dataclass(eq=False, slots=True)
class _Record:
    """`filled`: parts whose bytes the home has; `layer`: layer of the model."""

    home: Home
    layout: Layout
    filled: Parts
    layer: int | None

    def fetch(self, parts: Parts, into: UInt8[Tensor, " slot"], fence: Fence) -> Fetch:
        segments = list(self.layout.segments(parts))
        return Fetch(self.home, self.layer, segments, int(parts.sum()), into, fence)


@dataclass(eq=False, slots=True)
class _Here:
    """A record in a slot.

    Attributes:
        present: parts in the slot or on their way.
        brought: parts that came from the home and were not written since.
        written: parts that were written and not patched.
        bytes: the record's bytes in the slot.
        whole: True if the slot has all parts that the home has, so that nothing has to be fetched.
        arriving: whether compute has to wait for copies.
    """

    slot: RingSlot
    present: Parts
    brought: Parts
    written: Parts
    bytes: UInt8[Tensor, " nbytes"]
    whole: bool = False
    arriving: bool = False


class Residency:
    """Records over the slots of a ring. Records may be placed before the slots open, and outlive them."""

    def __init__(
        self,
        traffic: Traffic,
        record: Callable[[TierEvent], None],
        passing: Ring | None = None,
        *,
        recurs: Callable[[Hashable], bool] = lambda _: False,
    ) -> None:
        """`record`: called with each event. `passing`: host slots for records in files; None without files. `recurs`:
        whether a record is used cyclically, so that the record unused for longest will be needed first."""
        self._traffic, self._record, self._fetcher = traffic, record, Fetcher(traffic, record, passing)
        self._slots: Ring | None = None
        self._recurs = recurs
        self._records: dict[Hashable, _Record] = {}
        self._here: dict[Hashable, _Here] = {}  # the record unused for longest first
        self._using: set[Hashable] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def home(self, key: Hashable) -> Home:
        """The home of a record. Raises `KeyError` for an unknown key."""
        return self._records[key].home

    def place(
        self, key: Hashable, home: Home, *, layout: Layout | None = None, filled: bool = True, layer: int | None = None
    ) -> None:
        """Add a record. Raises `ValueError` if the key is in use.

        Args:
            key: name of the record.
            home: home of its bytes.
            layout: layout of its parts; None for a single part.
            filled: whether the home has the bytes already; if not, `patch` sends them.
            layer: layer of the model, for figures by layer.
        """
        if key in self._records:
            raise ValueError(f"there is a record {key} already")
        layout = layout or Equal(home.nbytes)
        self._records[key] = _Record(home, layout, np.full(layout.parts, filled), layer)

    def move(self, key: Hashable, home: Home) -> None:
        """Give a record another home with the same bytes, and free the former one. Raises `KeyError` for an unknown
        key."""
        record = self._records[key]
        former, record.home = record.home, home
        former.free()

    def remove(self, key: Hashable) -> None:
        """Remove a record and free its home. Raises `KeyError` for an unknown key."""
        self.drop(key)
        self._records.pop(key).home.free()

    @property
    def opened(self) -> bool:
        return self._slots is not None

    def open(self, slots: Ring) -> None:
        self._slots = slots

    def use(self, wanted: Sequence[Wanted], ahead: Sequence[Wanted] = ()) -> list[UInt8[Tensor, " nbytes"]]:
        """Let compute wait for records, and fetch the records that are wanted next. This ends the use of all others.

        Args:
            wanted: distinct records, at most as many as there are slots.
            ahead: records that the next calls will want. A record that finds no slot stays in its home.

        Returns:
            The bytes of each record in its slot, valid until the next `use` without it.

        Raises:
            KeyError: a key is unknown.
            TransferError: a copy failed. The records are dropped, and may be used again.
            ValueError: there are more records than slots.
        """
        self._traffic.harvest()
        keys = [each.key for each in wanted]
        self._end_use(self._using.difference(keys))
        kept = {*keys, *(each.key for each in ahead)}
        # A record that is wanted next loses its slot to one that is wanted now only if there is no other slot.
        if not all(self._enter(key, kept) or self._enter(key, {*keys}) for key in keys):
            raise ValueError(f"{len(keys)} records are wanted at once: there are too few slots")
        self._using.update(keys)
        self._send(wanted)
        self._send([each for each in ahead if self._enter(each.key, kept)])
        arriving = [key for key in keys if self._here[key].arriving]
        if arriving:
            try:
                self._await([self._here[key].slot.fence for key in arriving], self._layer_of(arriving))
            except BaseException:
                for key in arriving:
                    self.drop(key)
                raise
        for key in arriving:
            self._here[key].arriving = False
        return [self._here[key].bytes for key in keys]

    def write(self, key: Hashable, parts: Parts) -> None:
        """Let compute write bytes of a record in use, in `parts`. The other bytes of these parts are present, or were
        never written. Call `patch` before another record is used. Raises `KeyError` for a record without a slot."""
        here = self._here[key]
        here.present, here.brought, here.written = here.present | parts, here.brought & ~parts, here.written | parts
        self._traffic.compute(Lane.STORE, writes=[here.slot.fence], layer=self._records[key].layer)

    def patch(self, key: Hashable, segments: Iterable[Segment] | None = None) -> None:
        """Copy `segments` of the slot home; None for all written parts. Raises `KeyError` if there is no slot."""
        here, record = self._here[key], self._records[key]
        home, slot, parts = record.home, here.slot, here.written
        assert home.memory is not None, "files are only read"
        record.filled |= parts
        here.written = np.zeros_like(parts)
        self._traffic.compute(Lane.STORE, writes=[slot.fence], layer=record.layer)
        segments = record.layout.segments(parts) if segments is None else segments
        copies = [Copy(slot.bytes[to : to + size], home.memory[at : at + size]) for at, to, size in segments]
        # The job also reads the home: after a failed copy the home lacks bytes, so every later copy has to fail too.
        self._traffic.move(Lane.STORE, copies, reads=[slot.fence, home.fence], writes=[home.fence], layer=record.layer)
        nbytes = sum(copy.source.numel() for copy in copies)
        self._record(Stored(tier=home.tier, records=int(parts.sum()), nbytes=nbytes))

    def missing(self, wanted: Wanted) -> Parts:
        """The parts that a use would fetch to a slot."""
        record, here = self._records[wanted.key], self._here.get(wanted.key)
        parts = record.filled if wanted.parts is None else record.filled & wanted.parts
        return parts if here is None else parts & ~here.present

    def has(self, key: Hashable) -> bool:
        """Whether all parts of a record are in a slot, or on their way to one."""
        here = self._here.get(key)
        return here is not None and here.whole

    def ready(self, key: Hashable) -> bool:
        """Whether all parts of a record are in a slot, and compute has to wait for none of them."""
        here = self._here.get(key)
        if here is None or not here.whole:
            return False
        return not here.arriving or all(event.done() for event in here.slot.fence.before_read())

    def brought(self, wanted: Wanted) -> Parts:
        """The parts that came to their slot from the home, or would come, and were not written since."""
        here, missing = self._here.get(wanted.key), self.missing(wanted)
        brought = np.zeros_like(missing) if here is None else here.brought
        return missing | (brought if wanted.parts is None else brought & wanted.parts)

    def copy_out(
        self, key: Hashable, segments: Sequence[Segment], into: UInt8[Tensor, " nbytes"], fence: Fence
    ) -> None:
        """Copy `segments` of a record to device memory that `fence` guards, and let compute wait for them. Errors as
        `use`."""
        record = self._records[key]
        self._fetcher.send([Fetch(record.home, record.layer, list(segments), len(record.filled), into, fence)])
        self._await([fence], record.layer)

    def rest(self) -> None:
        """End the use of all records; the next `use` may come from another stream. Counts ended copies."""
        self._end_use(set(self._using))
        self._traffic.harvest()

    def drop(self, key: Hashable) -> None:
        """Take a record out of its slot, if it is in one."""
        self._end_use(self._using & {key})
        if (here := self._here.pop(key, None)) is not None:
            here.slot.release()

    def empty(self) -> None:
        for key in list(self._here):
            self.drop(key)

    def close_slots(self) -> None:
        """Drop the slots and the records in them, in any state of a call that was broken off. The caller frees them."""
        self._using.clear()
        while self._here:
            self._here.popitem()[1].slot.release()  # a ring and a held slot refer to each other
        self._slots = None

    def close(self) -> None:
        self.close_slots()
        while self._records:
            self._records.popitem()[1].home.free()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the books contradict themselves."""
        if self._slots is not None:
            self._slots.check_integrity()
            if self._slots.held != len(self._here):
                raise RuntimeError(f"{self._slots.held} slots are held, by {len(self._here)} records")
        if not self._using <= self._here.keys() <= self._records.keys():
            raise RuntimeError(f"in use {self._using}, in slots {set(self._here)}, of {set(self._records)}")
        for key, here in self._here.items():
            there = self._records[key].filled | here.written
            absent = here.whole and (self._records[key].filled & ~here.present).any()
            if absent or (here.present & ~there).any() or (here.brought & ~here.present).any():
                raise RuntimeError(f"{key}: {here}, filled {self._records[key].filled}")
        self._fetcher.check_integrity()

    def _send(self, wanted: Sequence[Wanted]) -> None:
        wanted = [each for each in wanted if not self._here[each.key].whole]
        missing = [(each.key, parts) for each in wanted if (parts := self.missing(each)).any()]
        slots = [self._here[key].slot for key, _ in missing]
        self._fetcher.send(
            self._records[key].fetch(parts, slot.bytes, slot.fence)
            for (key, parts), slot in zip(missing, slots, strict=True)
        )
        for key, parts in missing:
            here = self._here[key]
            here.present, here.brought, here.arriving = here.present | parts, here.brought | parts, True
        for each in wanted:
            if each.parts is None:
                self._here[each.key].whole = True

    def _enter(self, key: Hashable, kept: Set[Hashable]) -> bool:
        """Give a record a slot if possible; returns whether it has one. If all are taken, the record unused for longest
        loses its slot, or, if that one recurs, the record used last."""
        assert self._slots is not None, "slots are open"
        if (here := self._here.pop(key, None)) is not None:
            self._here[key] = here
            return True
        record = self._records[key]
        slot = self._slots.acquire()
        if slot is None:
            leaving = next((other for other in self._here if other not in kept), None)
            if leaving is None:
                return False
            if self._recurs(leaving):
                leaving = next(other for other in reversed(self._here) if other not in kept)
            assert not self._here[leaving].written.any(), "written parts are patched before another record is used"
            self.drop(leaving)
            slot = self._slots.acquire()
            assert slot is not None, "a slot was freed"
        none = np.zeros(record.layout.parts, dtype=bool)
        self._here[key] = _Here(slot, none, none.copy(), none.copy(), slot.bytes[: record.home.nbytes])
        return True

    def _await(self, fences: Sequence[Fence], layer: int | None) -> None:
        event = self._traffic.compute(Lane.FETCH, reads=fences, layer=layer)
        if event.done():
            event.synchronize()

    def _end_use(self, keys: Set[Hashable]) -> None:
        """Let later copies to the slots wait for the present work of compute."""
        if keys:
            fences, layer = [self._here[key].slot.fence for key in keys], self._layer_of(keys)
            self._using.difference_update(keys)
            self._traffic.compute(Lane.FETCH, reads=fences, layer=layer)

    def _layer_of(self, keys: Iterable[Hashable]) -> int | None:
        """The layer of records; None if they are of several."""
        layers = {self._records[key].layer for key in keys}
        return layers.pop() if len(layers) == 1 else None
