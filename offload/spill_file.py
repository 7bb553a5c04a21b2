"""The disk tier: one preallocated file of records, each with its name, version and checksums.

Reads and writes go through the page cache. So the system may hold what was written in RAM that no budget of ours counts
and that it gives up when others need it; a read may be served from there, faster than the disk; and a record outlives
the process once `write` has returned, but a loss of power only once `save_table` has.
"""

from collections.abc import Mapping
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.arena import ArenaStats
from tiered.offload.errors import ArenaFullError, CorruptRecordError
from tiered.offload.fence import Fence, Region
from tiered.offload.record_file import RecordFile
from tiered.offload.slab_fences import SlabFences
from tiered.offload.slabs import Place, SlabBook
from tiered.offload.spill_record import HEADER_BYTES
from tiered.offload.spill_table import SpillTable, TableEntry, part_path, table_path


class DiskSlot:
    """The room of one record in the file.

    Attributes:
        nbytes: bytes of the payload.
        room_bytes: bytes of the slot; the header is in it.
        offset: of the header in the file.
        fence: what is under way on these bytes, by earlier users too. Tell it of accesses before `release`.
    """

    __slots__ = ("_file", "_place", "fence", "nbytes", "offset", "room_bytes")

    def __init__(self, file: "SpillFile", place: Place, fence: Fence) -> None:
        self._file = file
        self._place = place
        self.nbytes = place.nbytes - HEADER_BYTES
        self.room_bytes = place.room
        self.offset = place.offset
        self.fence = fence

    def release(self) -> None:
        """Give the slot back. What is under way on its bytes may go on: the next user waits for it.

        Raises:
            ValueError: released already, or the file is closed.
        """
        self._file._release(self)


class SpillFile:
    """Slots of size classes in one file. `write` and `read` may run on any thread; all else is for the manager's.

    An open spill file is locked, so that no other runtime takes it. After a fork it is the parent's.

    Args:
        path: of the file; `<path>.table` lies beside it.
        capacity: bytes of the file, taken from the disk at once; what is over whole slabs is left.
        slab_bytes: a multiple of 4096; the largest record with its header of 64 bytes.
        reopen: keep the file and its records as `save_table` left them (see `load_table`), instead of starting anew.

    Raises:
        ArenaFullError: the disk has no room for the file; a new one is not left behind.
        CorruptRecordError: the table is damaged.
        ValueError: a path or size that does not work, a file that is in use, or one that is no spill file.
    """

    def __init__(self, path: str | Path, capacity: int, slab_bytes: int, *, reopen: bool = False) -> None:
        self.path = Path(path)
        self.book = SlabBook(slab_bytes)
        if capacity < slab_bytes:
            raise ValueError(f"disk capacity = {capacity} bytes must be slab_bytes = {slab_bytes} or more")
        self.slab_bytes = slab_bytes
        self._fences = SlabFences(Region.DISK_SLOT)
        self._slots: dict[int, DiskSlot] = {}  # in use, by offset
        self._records: dict[str, tuple[DiskSlot, int]] = {}
        self._file = RecordFile(self.path, create=not reopen)
        try:
            if reopen:
                self._take_over(capacity)
            else:
                self._start(capacity)
        except BaseException:
            self._file.close()
            raise

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.book.capacity_bytes

    def place(self, nbytes: int) -> DiskSlot:
        """A slot for a payload of `nbytes`.

        Raises:
            ArenaFullError: no slot of its class is free.
            ValueError: closed, or `nbytes` is not 1 to `slab_bytes` less the header.
        """
        self._file.check_open()
        whole = nbytes + HEADER_BYTES
        if not HEADER_BYTES < whole <= self.slab_bytes:
            most = self.slab_bytes - HEADER_BYTES
            raise ValueError(f"a record of {nbytes} bytes: 1 to {most}, slab_bytes = {self.slab_bytes} less the header")
        place = self.book.allocate(whole)
        if place is None:
            what = f"spill file {self.path} (memory=MemoryBudget(disk=…, disk_path=…))"
            raise ArenaFullError(self.book.room_for(whole), self.book.free_bytes(whole), self.file_bytes, what)
        return self._slot(place)

    def write(self, slot: DiskSlot, name: str | bytes, version: int, payload: UInt8[Tensor, " nbytes"]) -> int:
        """Write the record; blocks. Returns the bytes written, header included.

        Raises:
            ArenaFullError: the disk is full all the same, as those are that copy on write.
            TransferError: the system could not write.
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

    def save_table(self, records: Mapping[str, tuple[DiskSlot, int]]) -> None:
        """Say which records a later `reopen` shall find: name → slot and version. Their writes must have ended.

        A process killed in here leaves the old table or the new one.

        Raises:
            OSError: the system could not write; the old table stands.
            ValueError: closed, or a slot that is not in use.
        """
        self._file.check_open()
        for name, (slot, _) in records.items():
            if self._slots.get(slot.offset) is not slot:
                raise ValueError(f"record {name!r} is in a slot that was released, or in another file")
        self._file.sync()  # a table that is on the disk has its records there too
        entries = {name: TableEntry(slot.offset, slot.nbytes, version) for name, (slot, version) in records.items()}
        SpillTable(self.slab_bytes, self.book.slabs, entries).save(table_path(self.path))

    def load_table(self) -> dict[str, tuple[DiskSlot, int]]:
        """The records that the table named when the file was reopened: name → slot and version.

        The slots are in use. Whether a record is whole, `read` says.
        """
        self._file.check_open()
        return dict(self._records)

    def stats(self) -> ArenaStats:
        """What is requested, headers included, what is held, and the bytes of the file."""
        return ArenaStats(self.book.requested_bytes, self.book.held_bytes, self.file_bytes, 0)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` with the numbers where the books are not what the slots and the file hold."""
        self._file.check_open()
        self.book.check_integrity()
        slots, stats = self._slots.values(), self.stats()
        held = sum(slot.nbytes + HEADER_BYTES for slot in slots), sum(slot.room_bytes for slot in slots)
        if (self._file.nbytes, *held) != (stats.actual_bytes, stats.requested_bytes, stats.held_bytes):
            raise RuntimeError(f"{self.path} of {self._file.nbytes} bytes, slots of {held}, {stats}")

    def close(self, delete: bool = True) -> None:
        """Wait for the threads inside `write` and `read`, then close, and delete file and table unless told not to.

        May be called again. A forked child's call leaves the file to the parent.
        """
        self._file.close(self._paths() if delete else ())

    def _start(self, capacity: int) -> None:
        """An empty file of full length, over whatever spill file was there."""
        table = table_path(self.path)
        if self._file.nbytes and not table.exists():
            raise ValueError(f"disk_path {self.path} is there and no spill file: it stays; choose another path")
        self.book.add_slabs(capacity // self.slab_bytes)
        try:
            SpillTable(self.slab_bytes, self.book.slabs, {}).save(table)
            self._file.truncate()
            self._file.preallocate(self.file_bytes)
        except BaseException:
            self._file.close(self._paths())
            raise

    def _take_over(self, capacity: int) -> None:
        """The file and its records as they are."""
        try:
            table = SpillTable.load(table_path(self.path))
        except FileNotFoundError as error:
            raise ValueError(f"disk_path {self.path} has no table: nothing to reopen") from error
        if table.slab_bytes != self.slab_bytes or not 0 < table.slabs * table.slab_bytes <= capacity:
            raise ValueError(
                f"spill file {self.path} has {table.slabs} slabs of {table.slab_bytes} bytes; slab_bytes = "
                f"{self.slab_bytes} must be the same, and disk capacity = {capacity} hold them"
            )
        self.book.add_slabs(table.slabs)
        for name, entry in table.records.items():
            try:
                place = self.book.allocate_at(entry.offset, entry.nbytes + HEADER_BYTES)
            except ValueError as error:
                raise CorruptRecordError(f"the table of {self.path} is wrong about record {name!r}: {error}") from error
            self._records[name] = self._slot(place), entry.version
        self._file.preallocate(self.file_bytes)  # where it was cut short, there are zeros now, and no valid header

    def _slot(self, place: Place) -> DiskSlot:
        slot = self._slots[place.offset] = DiskSlot(self, place, self._fences.fence(place))
        return slot

    def _release(self, slot: DiskSlot) -> None:
        self._file.check_open()
        self.book.release(slot._place)
        del self._slots[slot.offset]

    def _paths(self) -> tuple[Path, ...]:
        table = table_path(self.path)
        return self.path, table, part_path(table)


def _check_length(data: UInt8[Tensor, " nbytes"], slot: DiskSlot) -> None:
    if data.numel() != slot.nbytes:
        raise ValueError(f"{data.numel()} bytes for a slot of {slot.nbytes}")
