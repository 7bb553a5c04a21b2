"""The events that an access to some bytes has to wait for: the transport law, in one place.

Before a region is read, its last write must have ended; before it is written, its last write and every read since.
"""

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Protocol, runtime_checkable

from tiered.offload.errors import TransferError
from tiered.offload.slabs import BookedSlot


@runtime_checkable
class Event(Protocol):
    """The end of a copy, or of the work that was on the compute stream when the event was recorded."""

    def done(self) -> bool:
        """True if it has ended or failed. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the host until it has ended.

        Raises:
            TransferError: it failed.
        """
        ...


class Region(StrEnum):
    """The kind of bytes that a fence guards."""

    FETCH_SLOT = "fetch_slot"  # device ring that records arrive in, and are used in
    STORE_SLOT = "store_slot"  # device ring that records leave from
    LOAD_SLOT = "load_slot"  # host ring that records from files pass
    DEVICE_SLOT = "device_slot"  # a record that stays on the device
    HOST_SLOT = "host_slot"
    DISK_SLOT = "disk_slot"


class Fence:
    """The unfinished accesses to one region. Not for several threads."""

    __slots__ = ("_reads", "_write", "region")

    def __init__(self, region: Region, earlier: Iterable[Event] = ()) -> None:
        """`earlier`: events of accesses that are under way already."""
        self.region = region
        self._write: tuple[Event, ...] = tuple(earlier)
        self._reads: list[Event] = []

    def before_read(self) -> tuple[Event, ...]:
        """The events that a read has to wait for."""
        return self._write

    def before_write(self) -> tuple[Event, ...]:
        """The events that a write has to wait for."""
        return (*self._write, *self._reads)

    def reads(self, event: Event) -> None:
        """A read has begun that ends with `event`."""
        self._reads = [read for read in self._reads if not read.done()]
        self._reads.append(event)

    def writes(self, event: Event) -> None:
        """A write has begun that ends with `event`. It waits for `before_write`, so later users wait for it alone."""
        self._write = (event,)
        self._reads = []

    def inherit(self, fences: Iterable["Fence"]) -> None:
        """Take over the unfinished accesses of the regions that this one is cut from."""
        for fence in fences:
            self._write += tuple(event for event in fence.before_write() if not event.done())

    def idle(self) -> bool:
        """True if nothing is under way."""
        return all(event.done() for event in self.before_write())


def settle(fences: Iterable[Fence]) -> None:
    """Block the host until all accesses to the bytes of `fences` have ended or failed."""
    for fence in fences:
        for event in fence.before_write():
            with suppress(TransferError):
                event.synchronize()


class SlabFences:
    """One fence for each slot of a slab book. Fences outlive slots: a new user waits for what earlier users left
    unfinished. Not for several threads."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._rooms: dict[int, int] = {}  # slab → the class that its fences are of
        self._fences: dict[int, dict[int, Fence]] = {}  # slab → slot → fence
        self._former: dict[int, list[tuple[int, int, Fence]]] = {}  # slab → (first byte, end, fence) of earlier classes

    def begin(self, slab: int, slab_bytes: int, earlier: Iterable[Event]) -> None:
        """Add a slab. `earlier`: events of accesses that are under way on its bytes."""
        self._former[slab] = [(0, slab_bytes, Fence(self.region, earlier))]

    def fence(self, booked: BookedSlot) -> Fence:
        """The fence of a slot that was just booked. It waits for every unfinished access to any of its bytes.

        An access by an earlier user counts when that user's fence knew of it before the slot was released.
        """
        slab, room = booked.slab, booked.room
        if self._rooms.get(slab) != room:
            self._recut(slab, room)
        fences = self._fences[slab]
        fence = fences.get(booked.index)
        # An idle fence may end in a failed copy, which does not concern the new user.
        if fence is None or fence.idle():
            first, end = booked.index * room, (booked.index + 1) * room
            former = self._former[slab]
            former[:] = [(start, stop, old) for start, stop, old in former if not old.idle()]
            fence = fences[booked.index] = Fence(self.region)
            fence.inherit(old for start, stop, old in former if start < end and first < stop)
        return fence

    def unfinished(self) -> list[Fence]:
        """The fences with an access under way, of slots in use and of released ones."""
        current = [fence for fences in self._fences.values() for fence in fences.values()]
        former = [fence for entries in self._former.values() for _, _, fence in entries]
        return [fence for fence in [*current, *former] if not fence.idle()]

    def _recut(self, slab: int, room: int) -> None:
        """Change the class of a slab; unfinished accesses of its old slots are kept by bytes."""
        old = self._rooms.get(slab, 0)
        former = self._former.setdefault(slab, [])
        former += [(index * old, (index + 1) * old, fence) for index, fence in self._fences.get(slab, {}).items()]
        self._rooms[slab] = room
        self._fences[slab] = {}
