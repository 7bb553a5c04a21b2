"""Staging slots on the device that records arrive in or leave from, used over and over in turn.

             acquire           its write ends         a read begins
      EMPTY ─────────► FILLING ──────────────► READY ◄────────────► IN_USE
        ▲                 │                      │   all reads end     │
        └─────────────────┴──────── release ─────┴─────────────────────┘

Release does not wait: a slot may be empty in the books while the device still reads it. So the next holder's fence
starts with whatever is unfinished, and its first write waits for that to be over, well or badly.
"""

from collections.abc import Iterable
from enum import StrEnum

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.fence import Event, Fence, Region
from tiered.offload.ring_books import Hold, RingBooks
from tiered.offload.transport import Settled


class SlotState(StrEnum):
    """Where a slot is in its life."""

    EMPTY = "empty"  # nobody holds it
    FILLING = "filling"  # held; its write has not ended, or not begun
    READY = "ready"  # held and written; nobody reads
    IN_USE = "in_use"  # held and written; a read has not ended


class RingSlot:
    """A slot in one holder's hands. `fence` guards `bytes`; tell it of every access before `release`."""

    __slots__ = ("_hold", "_ring", "bytes", "fence")

    def __init__(self, ring: "Ring", hold: Hold, content: UInt8[Tensor, " slot_bytes"], fence: Fence) -> None:
        self.bytes = content
        self.fence = fence
        self._ring = ring
        self._hold = hold

    @property
    def index(self) -> int:
        """The slot's number in the ring."""
        return self._hold.index

    @property
    def state(self) -> SlotState:
        """Where the slot is in this holder's hands. Never blocks."""
        if not self._ring.holds(self._hold):
            return SlotState.EMPTY
        writes = self.fence.before_read()
        if not writes or not all(event.done() for event in writes):
            return SlotState.FILLING
        return SlotState.READY if self.fence.idle() else SlotState.IN_USE

    def release(self) -> None:
        """Give the slot back, at once, whatever is still under way in it.

        Raises:
            ValueError: released before.
        """
        self._ring.release(self._hold)


class Ring:
    """`slots` equal parts of `buffer`, which the caller made on the device. Not for several threads. `earlier`: what is
    under way on the buffer already (`Chunk.earlier`).

    Raises:
        ValueError: a buffer that is not contiguous bytes, or does not divide into `slots` parts of a byte or more.
    """

    def __init__(
        self, slots: int, buffer: UInt8[Tensor, " bytes"], region: Region, earlier: Iterable[Event] = ()
    ) -> None:
        self._books = RingBooks(slots)
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(
                f"the buffer of a ring has shape {tuple(buffer.shape)} and type {buffer.dtype}; allowed: one "
                "contiguous dimension of torch.uint8"
            )
        if buffer.numel() == 0 or buffer.numel() % slots:
            raise ValueError(f"a buffer of {buffer.numel()} bytes does not divide into {slots} equal slots")
        self.region = region
        self._parts = buffer.view(slots, -1)
        self._fences = [Fence(region, earlier) for _ in range(slots)]

    @property
    def slots(self) -> int:
        return self._books.slots

    @property
    def slot_bytes(self) -> int:
        return self._parts.shape[1]

    @property
    def held(self) -> int:
        """Slots that are held now."""
        return self._books.held

    def acquire(self) -> RingSlot | None:
        """The next free slot, round robin; None where all are held. Never blocks."""
        hold = self._books.acquire()
        if hold is None:
            return None
        fence = Fence(self.region)
        for event in self._fences[hold.index].before_write():
            if not event.done():
                fence.reads(Settled(event))
        self._fences[hold.index] = fence
        return RingSlot(self, hold, self._parts[hold.index], fence)

    def holds(self, hold: Hold) -> bool:
        """Whether `hold` has not been released."""
        return self._books.holds(hold)

    def release(self, hold: Hold) -> None:
        """See `RingSlot.release`."""
        self._books.release(hold)

    def idle(self) -> bool:
        """Whether no copy and no reader is under way in any slot."""
        return all(fence.idle() for fence in self._fences)

    def check_integrity(self) -> None:
        """Raise RuntimeError where the books contradict themselves."""
        self._books.check_integrity()
