"""The events that an access to some bytes has to wait for: the transport law, in one place.

A read of a region must wait for its last write. A write must wait for its last write and every read since.
"""

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Protocol, runtime_checkable

from tiered.offload.errors import TransferError


@runtime_checkable
class Event(Protocol):
    """The end of a copy, or of the work that was on the compute stream when the event was recorded."""

    def done(self) -> bool:
        """True if it has ended or failed. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the host until it has ended. Raises `TransferError` if it failed."""
        ...


class Region(StrEnum):
    """The kind of bytes that a fence guards."""

    FETCH_SLOT = "fetch_slot"  # device ring in which records arrive, are used and are sent home
    LOAD_SLOT = "load_slot"  # host ring that records from files pass through
    DEVICE_SLOT = "device_slot"  # memory of a record or of a layer that stays on the device
    HOST_SLOT = "host_slot"
    DISK_SLOT = "disk_slot"


class Fence:
    """The unfinished accesses to one region. Not for several threads."""

    __slots__ = ("_reads", "_write", "region")

    def __init__(self, region: Region, earlier: Iterable[Event] = ()) -> None:
        """`earlier`: events of accesses that have begun already."""
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
        """Add a read that ends with `event`."""
        self._reads = [read for read in self._reads if not read.done()]
        self._reads.append(event)

    def writes(self, event: Event) -> None:
        """Add a write that ends with `event`. It waits for `before_write`, so later accesses only wait for it."""
        self._write = (event,)
        self._reads = []


def settle(fences: Iterable[Fence]) -> None:
    """Block the host until all accesses to the bytes of `fences` have ended or failed."""
    for fence in fences:
        for event in fence.before_write():
            with suppress(TransferError):
                event.synchronize()
