"""An unnamed file for records that are written once and read often, each with a checksum in memory.

Reads and writes go through the page cache. So the system may keep written records in RAM that our budget does not
count, and drops them under memory pressure. A read from there is faster than the disk.
"""

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.errors import CorruptRecordError, NoRoomError, TransferError
from tiered.offload.fence import Fence, Region
from tiered.offload.file_record import moved, read_into

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota, a limit on the length of files


class ScratchSlot:
    """The room of one record in the file.

    Attributes:
        index: number of the slot in the file.
        nbytes: bytes of the record.
        fence: guards these bytes.
    """

    __slots__ = ("_checksum", "_file", "fence", "index", "nbytes")

    def __init__(self, file: "ScratchFile", index: int, nbytes: int) -> None:
        self._file, self.index, self.nbytes = file, index, nbytes
        self._checksum: int | None = None
        self.fence = Fence(Region.DISK_SLOT)

    def write(self, payload: UInt8[Tensor, " nbytes"]) -> int:
        """Write the record; blocks. Returns the bytes written. On any thread. Raises `TransferError` if the system
        could not write: a disk that copies on write may be full in spite of the reservation."""
        data = memoryview(payload.numpy())
        self._checksum = zlib.crc32(data)
        with self._file._using(f"writing {self}") as descriptor:
            if moved(os.pwrite, descriptor, data, self._offset) < len(data):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return len(data)

    def read(self, into: UInt8[Tensor, " nbytes"]) -> int:
        """Read the record into `into`, whose content is undefined after an error; blocks. Returns the bytes read. On
        any thread. Raises `CorruptRecordError` if the bytes differ from those written, and `TransferError` if the
        system could not read."""
        data = memoryview(into.numpy())
        with self._file._using(f"reading {self}") as descriptor:
            count = moved(read_into, descriptor, data, self._offset)
        if count < len(data):
            raise CorruptRecordError(f"{self}: the file ends after {count} of {len(data)} bytes")
        if zlib.crc32(data) != self._checksum:
            raise CorruptRecordError(f"{self}: the checksum differs")
        return count

    def release(self) -> None:
        """Give the slot back; no access may be unfinished."""
        self._file._release(self)

    def __str__(self) -> str:
        return f"the record at offset {self._offset} of the scratch file in {self._file.folder}"

    @property
    def _offset(self) -> int:
        return self.index * self._file.slot_bytes


class ScratchFile:
    """Slots of one size in one file, which is as long as its last slot in use.

    The file has no name: it cannot clash with others, and it disappears with the process. Slots are written and read on
    any thread; all other methods are for the owner's. After a fork the file is the parent's.

    Args:
        folder: folder of the file; may be a link to one.
        slot_bytes: bytes of the largest record.
        on_grow: called with the bytes before they are taken from the disk; raises to refuse.
        on_shrink: called with the bytes that were given back, or that the disk refused after `on_grow`.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(
        self,
        folder: str | Path,
        slot_bytes: int,
        on_grow: Callable[[int], object] = lambda nbytes: None,
        on_shrink: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.folder, self.slot_bytes, self.file_bytes = folder, slot_bytes, 0
        self._on_grow, self._on_shrink = on_grow, on_shrink
        self._slots: dict[int, ScratchSlot] = {}  # in use, by index
        self._process = os.getpid()
        self._closed = False
        try:
            # Uses O_TMPFILE, which does not follow links, or else a random name that is unlinked at once.
            self._file = TemporaryFile(buffering=0, prefix="tiered-", dir=os.path.realpath(folder))  # noqa: SIM115
        except OSError as error:
            raise self._named(error) from error

    def place(self, nbytes: int) -> ScratchSlot:
        """A slot for a record of `nbytes`. May take bytes from the disk.

        Raises:
            NoRoomError: the disk is full. Errors of `on_grow` are passed on.
            OSError: the system refuses to let the file grow.
            ValueError: closed, or `nbytes` is not 1 to `slot_bytes`.
        """
        self._check_open()
        if not 0 < nbytes <= self.slot_bytes:
            raise ValueError(f"a record of {nbytes} bytes: allowed are 1 to slot_bytes = {self.slot_bytes}")
        index = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        if (index + 1) * self.slot_bytes > self.file_bytes:
            self._grow()
        slot = self._slots[index] = ScratchSlot(self, index, nbytes)
        return slot

    def check_free(self, nbytes: int) -> int:
        """Free bytes of the disk, shared by all writers. Raises `NoRoomError` if they are fewer than `nbytes`."""
        disk = os.fstatvfs(self._file.fileno())
        free = disk.f_bavail * disk.f_frsize
        if free < nbytes:
            raise self._full(nbytes, free, os.strerror(errno.ENOSPC))
        return free

    def check_integrity(self) -> None:
        """Raise `RuntimeError` with the numbers if the books differ from the file."""
        self._check_open()
        found, end = os.fstat(self._file.fileno()).st_size, (max(self._slots, default=-1) + 1) * self.slot_bytes
        if not found == self.file_bytes == end:
            raise RuntimeError(f"the scratch file in {self.folder} of {found} bytes, booked {self.file_bytes}, {end}")

    def close(self) -> None:
        """Give the file back to the disk. No `write` or `read` may be unfinished. May be called again.

        A forked child's call leaves the file to the parent.
        """
        was_closed, self._closed = self._closed, True
        if not was_closed and os.getpid() == self._process:
            with suppress(OSError):  # a forked child has the descriptor too, and would keep the bytes
                os.ftruncate(self._file.fileno(), 0)
        self._file.close()
        self._on_shrink(self.file_bytes)
        self.file_bytes = 0

    def _grow(self) -> None:
        """Add a slot, booked first and taken from the disk at once, so that no write finds the disk full. An error
        leaves the file unchanged."""
        self._on_grow(self.slot_bytes)
        descriptor, end = self._file.fileno(), self.file_bytes
        try:
            free = self.check_free(self.slot_bytes)  # before the attempt, which may fill the disk and then fail
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, end, self.slot_bytes)
                else:  # macOS
                    moved(os.pwrite, descriptor, memoryview(bytes(self.slot_bytes)), end)
            except OSError as error:
                os.ftruncate(descriptor, end)
                if error.errno not in _REFUSED:
                    raise self._named(error) from error
                available = free if error.errno == errno.ENOSPC else 0
                raise self._full(self.slot_bytes, available, os.strerror(error.errno)) from error
        except BaseException:
            self._on_shrink(self.slot_bytes)
            raise
        self.file_bytes += self.slot_bytes

    def _release(self, slot: ScratchSlot) -> None:
        self._check_open()
        if self._slots.get(slot.index) is not slot:
            raise ValueError(f"{slot} was released before")
        del self._slots[slot.index]
        end = (max(self._slots, default=-1) + 1) * self.slot_bytes
        if end < self.file_bytes:
            os.ftruncate(self._file.fileno(), end)
            shrunk, self.file_bytes = self.file_bytes - end, end
            self._on_shrink(shrunk)

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                f"the scratch file in {self.folder} belongs to process {self._process}: this is a fork of it"
            )
        if self._closed:
            raise ValueError(f"the scratch file in {self.folder} is closed")

    @contextmanager
    def _using(self, what: str) -> Iterator[int]:
        self._check_open()
        try:
            yield self._file.fileno()
        except OSError as error:
            raise TransferError(f"{what}: {error}") from error

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, f"disk_path takes no file of records: {error.strerror}", str(self.folder))

    def _full(self, needed: int, available: int, reason: str) -> NoRoomError:
        disk = os.fstatvfs(self._file.fileno())
        what = f"the disk under disk_path {self.folder}"
        hint = f"{reason} in disk_path {self.folder}: make room there, name another folder, or lower `disk`"
        return NoRoomError(needed, available, disk.f_blocks * disk.f_frsize, what, hint)
