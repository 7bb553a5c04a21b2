"""Staging slots that records arrive in or leave from, reused in turn.

`release` does not wait: the device may still read a slot that is free in the books. So the next holder's fence starts
with the unfinished accesses, and its first write waits until they have ended or failed.
"""

from collections import deque
from collections.abc import Iterable

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.fence import Event, Fence, Region, settle
from tiered.offload.transport import Settled


class RingSlot:
    """Slot number `index` from one acquire to its release. `fence` guards `bytes`; it must have every access before
    `release`."""

    __slots__ = ("_ring", "bytes", "fence", "index")

    def __init__(self, ring: "Ring", index: int, content: UInt8[Tensor, " slot_bytes"], fence: Fence) -> None:
        self.index = index
        self.bytes = content
        self.fence = fence
        self._ring = ring

    def release(self) -> None:
        """Give the slot back at once; unfinished accesses may go on. Raises `ValueError` if it was released before."""
        self._ring._release(self)


class Ring:
    """`slots` equal parts of the caller's `buffer`. Not for several threads. `earlier`: events of unfinished accesses
    to the buffer (`Chunk.earlier`).

    Raises:
        ValueError: fewer than one slot, a buffer that is not contiguous bytes, or one that does not divide into `slots`
            parts of a byte or more.
    """

    def __init__(
        self, slots: int, buffer: UInt8[Tensor, " bytes"], region: Region, earlier: Iterable[Event] = ()
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots = {slots} must be 1 or more")
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(
                f"the buffer of a ring has shape {tuple(buffer.shape)} and type {buffer.dtype}; allowed: one "
                "contiguous dimension of torch.uint8"
            )
        if buffer.numel() == 0 or buffer.numel() % slots:
            raise ValueError(f"a buffer of {buffer.numel()} bytes does not divide into {slots} equal slots")
        self.region = region
        self.slots = slots
        self.slot_bytes = buffer.numel() // slots
        self.bytes = buffer
        self._parts = buffer.view(slots, -1)
        self._fences = [Fence(region, earlier) for _ in range(slots)]
        self._holders: list[RingSlot | None] = [None] * slots
        self._free = deque(range(slots))  # the slot that has been free longest first

    @property
    def held(self) -> int:
        return self.slots - len(self._free)

    def acquire(self) -> RingSlot | None:
        """The slot that has been free longest; None if all are in use. Never blocks."""
        if not self._free:
            return None
        index = self._free.popleft()
        fence = Fence(self.region)
        for event in self._fences[index].before_write():
            if not event.done():
                fence.reads(Settled(event))
        self._fences[index] = fence
        self._holders[index] = slot = RingSlot(self, index, self._parts[index], fence)
        return slot

    def settle(self) -> None:
        """Block the host until no copy and no read is unfinished in any slot."""
        settle(self._fences)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the ring contradicts itself."""
        free = [index for index, holder in enumerate(self._holders) if holder is None]
        if sorted(self._free) != free:
            raise RuntimeError(f"of {self.slots} slots of a ring {free} are free, and {sorted(self._free)} by its list")
        for index, holder in enumerate(self._holders):
            if holder is not None and (holder.index != index or holder.fence is not self._fences[index]):
                raise RuntimeError(f"slot {index} of a ring of {self.slots} is held as slot {holder.index}")

    def _release(self, slot: RingSlot) -> None:
        if self._holders[slot.index] is not slot:
            raise ValueError(f"slot {slot.index} is not held (any more): it was released before")
        self._holders[slot.index] = None
        self._free.append(slot.index)
