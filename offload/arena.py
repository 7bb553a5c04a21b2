"""Memory for records: slots of size classes over chunks that are obtained as needed. Host and device alike."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.chunk import Chunk
from tiered.offload.cuda_event import end_of_stream
from tiered.offload.errors import ArenaFullError
from tiered.offload.fence import Fence, Region, SlabFences, settle
from tiered.offload.slabs import BookedSlot, SlabBook

CHUNK_BYTES = 64 << 20  # of one registration; larger ones cost by byte alone
_CHUNKS = 8  # in a small arena of the expected size


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What an arena holds, in bytes.

    Attributes:
        requested_bytes: bytes of the records.
        held_bytes: bytes of their slots.
        actual_bytes: bytes of all chunks.
        pinned_bytes: bytes of the pinned chunks.
    """

    requested_bytes: int
    held_bytes: int
    actual_bytes: int
    pinned_bytes: int

    @property
    def pinned(self) -> bool:
        """True if there is memory and all of it is pinned."""
        return 0 < self.actual_bytes == self.pinned_bytes


class Slot:
    """The room of one record.

    Attributes:
        nbytes: bytes of the record.
        room_bytes: bytes of the slot.
        offset: first byte in the arena's address space.
        chunk: the chunk that it lies in.
        start: first byte in the chunk.
        fence: guards these bytes, against earlier users too. It has to know of every access before `release`.
    """

    __slots__ = ("_arena", "_booked", "_bytes", "chunk", "fence", "nbytes", "offset", "room_bytes", "start")

    def __init__(self, arena: "Arena", booked: BookedSlot, chunk: Chunk, start: int, fence: Fence) -> None:
        self._arena = arena
        self._booked = booked
        self._bytes: Tensor | None = chunk.bytes[start : start + booked.nbytes]
        self.nbytes = booked.nbytes
        self.room_bytes = booked.room
        self.offset = booked.offset
        self.chunk = chunk
        self.start = start
        self.fence = fence

    @property
    def bytes(self) -> UInt8[Tensor, " nbytes"]:
        """The record's bytes, a view of exactly `nbytes`.

        Raises:
            ValueError: released, or the arena is closed.
        """
        if self._bytes is None:
            raise ValueError(f"the slot at offset {self.offset} was released")
        return self._bytes

    def release(self) -> None:
        """Give the slot back. Accesses under way may go on: the next user waits for them.

        Raises:
            ValueError: released already, or the arena is closed.
        """
        self._arena._release(self)


class Arena:
    """Slots over slabs of `slab_bytes`, in chunks. Its memory grows up to `capacity` and stays until `close`.

    Not for several threads. Slots with neighbouring offsets are neighbours in memory within a chunk only.

    Args:
        region: kind of the bytes, for the fences.
        slab_bytes: bytes of the largest record, a multiple of 4096.
        capacity: the most bytes that all chunks may take from the system; None for no limit.
        allocate_chunk: obtains memory of a size, or of another size in whole slabs: `Pinner.allocate`, or the function
            of `device_chunks`.
        expected_bytes: the most bytes of all records. Up to it, `place` obtains an eighth at a time, in whole slabs and
            at most `CHUNK_BYTES`, if `capacity` allows; beyond it, one slab. Pinning costs by call as well as by byte.
    """

    def __init__(
        self,
        region: Region,
        slab_bytes: int,
        capacity: int | None,
        allocate_chunk: Callable[[int], Chunk],
        *,
        expected_bytes: int = 0,
    ) -> None:
        self.book = SlabBook(slab_bytes)
        for name, size in (("capacity", capacity), ("expected_bytes", expected_bytes)):
            if size is not None and size < 0:
                raise ValueError(f"{name} = {size} bytes must be 0 or more")
        self.region = region
        self.slab_bytes = slab_bytes
        self.capacity = capacity
        self._allocate_chunk = allocate_chunk
        self._expected_slabs = expected_bytes // slab_bytes
        self._fences = SlabFences(region)
        self.actual_bytes = 0  # of all chunks
        self._chunks: dict[int, Chunk] = {}  # by their first slab
        self._homes: dict[int, tuple[Chunk, int]] = {}  # slab → its chunk and first byte there
        self._slots: dict[int, Slot] = {}  # in use, by offset
        self._closed = False

    def place(self, nbytes: int) -> Slot:
        """A slot for a record of `nbytes`; its content is undefined. May obtain a chunk.

        Raises:
            ArenaFullError: no slot of its class is free, and `capacity` allows no other slab.
            PinError: the system refused a chunk. Other errors of `allocate_chunk` are raised too.
            ValueError: closed, or `nbytes` is not 1 to `slab_bytes`.
        """
        self._check_open()
        booked = self.book.allocate(nbytes)
        if booked is None:
            allowed = self._allowed_slabs()
            if allowed < 1:
                raise self._full(self.book.room_for(nbytes), self.book.free_bytes(nbytes))
            self._grow_by_a_chunk(max(1, min(self._chunk_slabs(), allowed)))
            booked = self.book.allocate(nbytes)
            assert booked is not None, "a new slab holds a record of any size"
        chunk, first = self._homes[booked.slab]
        slot = Slot(self, booked, chunk, first + booked.offset % self.slab_bytes, self._fences.fence(booked))
        self._slots[booked.offset] = slot
        return slot

    def stats(self) -> ArenaStats:
        """Bytes requested, held and obtained now; all 0 after `close`."""
        return ArenaStats(
            requested_bytes=0 if self._closed else self.book.requested_bytes,
            held_bytes=0 if self._closed else self.book.held_bytes,
            actual_bytes=self.actual_bytes,
            pinned_bytes=sum(chunk.actual_bytes for chunk in self._chunks.values() if chunk.pinned),
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` with the numbers if the books differ from the chunks."""
        self.book.check_integrity()
        stats = self.stats()
        booked = 0 if self._closed else self.book.capacity_bytes
        chunks = self._chunks.values()
        obtained = sum(chunk.bytes.numel() for chunk in chunks), sum(chunk.actual_bytes for chunk in chunks)
        if obtained != (booked, self.actual_bytes) or (self.capacity is not None and obtained[1] > self.capacity):
            raise RuntimeError(f"chunks of {obtained} bytes, slabs of {booked}, capacity {self.capacity}, {stats}")
        held = sum(slot.nbytes for slot in self._slots.values()), sum(slot.room_bytes for slot in self._slots.values())
        if held != (stats.requested_bytes, stats.held_bytes):
            raise RuntimeError(f"the slots hold {held} bytes, {stats}")
        for offset, slot in self._slots.items():
            expected = slot.chunk.bytes[slot.start :].data_ptr()
            if slot.offset != offset or slot.bytes.numel() != slot.nbytes or slot.bytes.data_ptr() != expected:
                raise RuntimeError(f"the slot at offset {offset} is not at {slot.start} of its chunk")

    def close(self) -> None:
        """Free all chunks, after the accesses that are under way. May be called again."""
        if self._closed:
            return
        self._closed = True
        settle(self._fences.unfinished())
        for slot in self._slots.values():
            slot._bytes = None
        self._slots.clear()
        for first in list(self._chunks):
            self._free(first)
        self._homes.clear()

    def _free(self, first: int) -> None:
        chunk = self._chunks.pop(first)
        chunk.free()
        self.actual_bytes -= chunk.actual_bytes

    def _release(self, slot: Slot) -> None:
        self._check_open()
        self.book.release(slot._booked)
        del self._slots[slot.offset]
        slot._bytes = None

    def _chunk_slabs(self) -> int:
        left = self._expected_slabs - self.book.slabs
        return min(self._expected_slabs // _CHUNKS, CHUNK_BYTES // self.slab_bytes, left)

    def _allowed_slabs(self) -> int:
        return sys.maxsize if self.capacity is None else (self.capacity - self.actual_bytes) // self.slab_bytes

    def _grow_by_a_chunk(self, slabs: int) -> None:
        """About `slabs` more: half as many, and half of that, if so many are refused, by `capacity`, a budget or the
        system. The error that refuses one slab is raised."""
        while True:
            try:
                return self._grow(slabs)
            except Exception:
                if slabs == 1:
                    raise
            slabs //= 2

    def _grow(self, slabs: int) -> None:
        chunk = self._allocate_chunk(slabs * self.slab_bytes)
        if self.capacity is not None and self.actual_bytes + chunk.actual_bytes > self.capacity:
            chunk.free()
            raise self._full(chunk.actual_bytes, self.capacity - self.actual_bytes)
        slabs = chunk.bytes.numel() // self.slab_bytes
        self.actual_bytes += chunk.actual_bytes
        first = self.book.add_slabs(slabs)
        self._chunks[first] = chunk
        for slab in range(slabs):
            self._fences.begin(first + slab, self.slab_bytes, chunk.earlier)
            self._homes[first + slab] = chunk, slab * self.slab_bytes

    def _full(self, needed: int, available: int) -> ArenaFullError:
        return ArenaFullError(needed, available, self.capacity or 0, f"the arena of {self.region}s")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the arena of {self.region}s is closed")


def device_chunks(device: torch.device) -> Callable[[int], Chunk]:
    """A function that allocates chunks of the device's memory, for `Arena`.

    CUDA's allocator gives out memory again as soon as its owner drops it, although kernels on the current stream may
    still use it. A copy on another stream has to wait for them, so the chunk has an event of the current stream.

    The function raises ArenaFullError if the device has no memory left.
    """

    def allocate(nbytes: int) -> Chunk:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise ArenaFullError(nbytes, free, total, f"{device} (memory=MemoryBudget(device=…))") from error
        earlier = end_of_stream(device) if device.type == "cuda" else None
        return Chunk(memory, pinned=False, actual_bytes=nbytes, earlier=earlier)

    return allocate
