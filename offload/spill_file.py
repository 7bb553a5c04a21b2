"""The disk tier: one file of records without a name, each record with its name, version and checksums.

Reads and writes go through the page cache. So the system may hold what was written in RAM that no budget of ours counts
and that it gives up when others need it; and a read may be served from there, faster than the disk.
"""

from collections.abc import Callable
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.arena import ArenaStats
from tiered.offload.fence import Fence, Region
from tiered.offload.record_file import RecordFile
from tiered.offload.slab_fences import SlabFences
from tiered.offload.slabs import BookedSlot, SlabBook
from tiered.offload.spill_record import HEADER_BYTES


class DiskSlot:
    """The room of one record in the file.

    Attributes:
        nbytes: bytes of the payload.
        room_bytes: bytes of the slot; the header is in it.
        offset: of the header in the file.
        fence: what is under way on these bytes, by earlier users too. Tell it of accesses before `release`.
    """

    __slots__ = ("_booked", "_file", "fence", "nbytes", "offset", "room_bytes")

    def __init__(self, file: "SpillFile", booked: BookedSlot, fence: Fence) -> None:
        self._file = file
        self._booked = booked
        self.nbytes = booked.nbytes - HEADER_BYTES
        self.room_bytes = booked.room
        self.offset = booked.offset
        self.fence = fence

    def read(self, name: str | bytes, version: int, into: UInt8[Tensor, " nbytes"]) -> int:
        """See `SpillFile.read`."""
        return self._file.read(self, name, version, into)

    def release(self) -> None:
        """Give the slot back. What is under way on its bytes may go on: the next user waits for it.

        Raises:
            ValueError: released already, or the file is closed.
        """
        self._file._release(self)


class SpillFile:
    """Slots of size classes in one file, which grows by a slab when it is full and stays as long until `close`.

    `write` and `read` may run on any thread; all else is for the manager's. After a fork the file is the parent's.

    Args:
        folder: where the file takes its room; it has no name there.
        slab_bytes: a multiple of 4096; the largest record with its header of 64 bytes.
        on_grow: told the bytes before they are taken from the disk; raises to refuse.
        on_shrink: told the bytes that were given back, or that the disk refused after `on_grow`.

    Raises:
        OSError: no file can be made there.
        ValueError: `slab_bytes` is no such multiple.
    """

    def __init__(
        self,
        folder: str | Path,
        slab_bytes: int,
        on_grow: Callable[[int], object] = lambda nbytes: None,
        on_shrink: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.book = SlabBook(slab_bytes)
        self.slab_bytes = slab_bytes
        self.file_bytes = 0
        self._on_grow = on_grow
        self._on_shrink = on_shrink
        self._fences = SlabFences(Region.DISK_SLOT)
        self._slots: dict[int, DiskSlot] = {}  # in use, by offset
        self._file = RecordFile(folder)

    def place(self, nbytes: int) -> DiskSlot:
        """A slot for a payload of `nbytes`. May take a slab from the disk.

        Raises:
            ArenaFullError: no slot of its class is free, and the disk is full. What `on_grow` raises, likewise.
            OSError: the system refuses to let the file grow.
            ValueError: closed, or `nbytes` is not 1 to `slab_bytes` less the header.
        """
        self._file.check_open()
        whole = nbytes + HEADER_BYTES
        if not HEADER_BYTES < whole <= self.slab_bytes:
            most = self.slab_bytes - HEADER_BYTES
            raise ValueError(f"a record of {nbytes} bytes: 1 to {most}, slab_bytes = {self.slab_bytes} less the header")
        booked = self.book.allocate(whole)
        if booked is None:
            self._grow()
            booked = self.book.allocate(whole)
            assert booked is not None, "a new slab holds a record of any size"
        slot = self._slots[booked.offset] = DiskSlot(self, booked, self._fences.fence(booked))
        return slot

    def write(self, slot: DiskSlot, name: str | bytes, version: int, payload: UInt8[Tensor, " nbytes"]) -> int:
        """Write the record; blocks. Returns the bytes written, header included.

        Raises:
            TransferError: the system could not write. That may be a full disk all the same where it copies on write.
            ValueError: closed, or a payload that is not `slot.nbytes` contiguous bytes on the CPU.
        """
        _check_length(payload, slot)
        return self._file.write(slot.offset, name, version, payload)

    def read(self, slot: DiskSlot, name: str | bytes, version: int, into: UInt8[Tensor, " nbytes"]) -> int:
        """Read the record into `into`, whose content is undefined after an error; blocks. Returns the bytes read.

        Raises:
            CorruptRecordError: what is there is not that record, as it was written.
            TransferError: the system could not read.
            ValueError: closed, or `into` is not `slot.nbytes` contiguous bytes on the CPU.
        """
        _check_length(into, slot)
        return self._file.read(slot.offset, name, version, into)

    def stats(self) -> ArenaStats:
        """What is requested, headers included, what is held, and the bytes of the file."""
        return ArenaStats(self.book.requested_bytes, self.book.held_bytes, self.file_bytes, 0)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` with the numbers where the books are not what the slots and the file hold."""
        self._file.check_open()
        self.book.check_integrity()
        slots, stats, found = self._slots.values(), self.stats(), self._file.nbytes
        held = sum(slot.nbytes + HEADER_BYTES for slot in slots), sum(slot.room_bytes for slot in slots)
        if (found, *held) != (stats.actual_bytes, stats.requested_bytes, stats.held_bytes):
            raise RuntimeError(f"the spill file in {self._file.folder} of {found} bytes, slots of {held}, {stats}")

    def close(self) -> None:
        """Wait for the threads inside `write` and `read`, then give the file back to the disk. May be called again.

        A forked child's call leaves the file to the parent.
        """
        self._file.close()
        self._on_shrink(self.file_bytes)
        self.file_bytes = 0

    def _grow(self) -> None:
        """One more slab, booked before it is there."""
        self._on_grow(self.slab_bytes)
        try:
            self._file.grow(self.slab_bytes)
        except BaseException:
            self._on_shrink(self.slab_bytes)
            raise
        self.file_bytes += self.slab_bytes
        self.book.add_slabs(1)

    def _release(self, slot: DiskSlot) -> None:
        self._file.check_open()
        self.book.release(slot._booked)
        del self._slots[slot.offset]


def _check_length(data: UInt8[Tensor, " nbytes"], slot: DiskSlot) -> None:
    if data.numel() != slot.nbytes:
        raise ValueError(f"{data.numel()} bytes for a slot of {slot.nbytes}")
