"""Which events a user of some bytes has to wait for: the transport law, in one place.

Before a region is read, its last write must have ended; before it is written, its last write and every read since.
"""

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Protocol, runtime_checkable

from tiered.offload.errors import TransferError


@runtime_checkable
class Event(Protocol):
    """Something that ends later: a copy, or the work that was on the compute stream when it was recorded."""

    def done(self) -> bool:
        """Whether it has ended, well or badly. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the host until it has ended.

        Raises:
            TransferError: it failed.
        """
        ...


class Region(StrEnum):
    """What kind of bytes a fence guards."""

    FETCH_SLOT = "fetch_slot"  # device ring that records arrive in
    STORE_SLOT = "store_slot"  # device ring that records leave from
    LOAD_SLOT = "load_slot"  # host ring that records from disk pass where the host tier is full
    DEVICE_SLOT = "device_slot"  # a record that stays on the device
    HOST_SLOT = "host_slot"
    DISK_SLOT = "disk_slot"


class Fence:
    """The unfinished accesses to one region. Not for several threads: the manager's caller alone uses it."""

    __slots__ = ("_reads", "_write", "region")

    def __init__(self, region: Region, earlier: Iterable[Event] = ()) -> None:
        """`earlier`: what is under way on the bytes already."""
        self.region = region
        self._write: tuple[Event, ...] = tuple(earlier)
        self._reads: list[Event] = []

    def before_read(self) -> tuple[Event, ...]:
        """What a reader has to wait for."""
        return self._write

    def before_write(self) -> tuple[Event, ...]:
        """What a writer has to wait for."""
        return (*self._write, *self._reads)

    def reads(self, event: Event) -> None:
        """A read has begun that ends with `event`."""
        self._reads = [read for read in self._reads if not read.done()]
        self._reads.append(event)

    def writes(self, event: Event) -> None:
        """A write has begun that ends with `event`; it was told to wait for `before_write`, so nothing else is left
        to wait for."""
        self._write = (event,)
        self._reads = []

    def inherit(self, fences: Iterable["Fence"]) -> None:
        """Take over what is unfinished in the regions whose bytes this one is made of."""
        for fence in fences:
            self._write += tuple(event for event in fence.before_write() if not event.done())

    def idle(self) -> bool:
        """Whether nothing is under way."""
        return all(event.done() for event in self.before_write())


def settle(fences: Iterable[Fence]) -> None:
    """Block the host until nothing is under way on the bytes of `fences`, however it ends."""
    for fence in fences:
        for event in fence.before_write():
            with suppress(TransferError):
                event.synchronize()
