"""The disk tier: one file of records without a name, each record with its name, version and checksums.

Reads and writes go through the page cache. The system may therefore hold written records in RAM that no budget of ours
counts and that it gives up under pressure; and a read may be served from there, faster than the disk.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.arena import ArenaStats
from tiered.offload.errors import ArenaFullError, CorruptRecordError, TransferError
from tiered.offload.fence import Fence, Region, SlabFences
from tiered.offload.slabs import BookedSlot, SlabBook
from tiered.offload.spill_record import HEADER_BYTES, Data, find_fault, pack_header

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota, a limit on the length of files


class DiskSlot:
    """The room of one record in the file.

    Attributes:
        nbytes: bytes of the payload.
        room_bytes: bytes of the slot, header included.
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
        """Give the slot back. Accesses under way may go on: the next user waits for them.

        Raises:
            ValueError: released already, or the file is closed.
        """
        self._file._release(self)


class SpillFile:
    """Slots of size classes in one file, which grows by a slab when it is full and never shrinks before `close`.

    The file has no name: it cannot clash with others, and it disappears with the process. `write` and `read` may run
    on any thread, all else on the manager's. After a fork the file is the parent's.

    Args:
        folder: where the file takes its room; may be a link to a folder.
        slab_bytes: a multiple of 4096; the largest record with its header of 64 bytes.
        on_grow: gets the bytes before they are taken from the disk; raises to refuse.
        on_shrink: gets the bytes that were given back, or that the disk refused after `on_grow`.

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
        self.folder = folder
        self._on_grow = on_grow
        self._on_shrink = on_shrink
        self._fences = SlabFences(Region.DISK_SLOT)
        self._slots: dict[int, DiskSlot] = {}  # in use, by offset
        self._process = os.getpid()
        self._idle = threading.Condition()
        self._users = 0  # threads inside `write` or `read`
        self._closed = False
        try:
            # O_TMPFILE, which does not follow links, or else a new file with a random name that is unlinked at once.
            self._file = TemporaryFile(buffering=0, prefix="tiered-", dir=os.path.realpath(folder))  # noqa: SIM115
        except OSError as error:
            raise self._named(error) from error

    def place(self, nbytes: int) -> DiskSlot:
        """A slot for a payload of `nbytes`. May take a slab from the disk.

        Raises:
            ArenaFullError: no slot of its class is free, and the disk is full. What `on_grow` raises, likewise.
            OSError: the system refuses to let the file grow.
            ValueError: closed, or `nbytes` is not 1 to `slab_bytes` less the header.
        """
        self._check_open()
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
            TransferError: the system could not write. On a disk that copies on write, it may be full all the same.
            ValueError: closed, or a payload that is not `slot.nbytes` contiguous bytes on the CPU.
        """
        data = _buffer(payload, slot)
        header = pack_header(name, version, slot.offset, data)
        with self._using(f"writing {self._record(name, slot)}") as descriptor:
            return _write_all(descriptor, [header, data], slot.offset)

    def read(self, slot: DiskSlot, name: str | bytes, version: int, into: UInt8[Tensor, " nbytes"]) -> int:
        """Read the record into `into`, whose content is undefined after an error; blocks. Returns the bytes read.

        Raises:
            CorruptRecordError: the bytes there are not that record, as it was written.
            TransferError: the system could not read.
            ValueError: closed, or `into` is not `slot.nbytes` contiguous bytes on the CPU.
        """
        data, header = _buffer(into, slot), bytearray(HEADER_BYTES)
        whole = HEADER_BYTES + data.nbytes
        with self._using(f"reading {self._record(name, slot)}") as descriptor:
            count = _moved(os.preadv, descriptor, [header, data], slot.offset)
        if count < whole:
            raise CorruptRecordError(f"{self._record(name, slot)}: the file ends after {count} of {whole} bytes")
        if fault := find_fault(header, name, version, slot.offset, data):
            raise CorruptRecordError(f"{self._record(name, slot)}: {fault}")
        return count

    def check_free(self, nbytes: int) -> int:
        """Bytes that the disk has free, for all who write to it.

        Raises:
            ArenaFullError: fewer than `nbytes`.
        """
        disk = os.fstatvfs(self._file.fileno())
        free = disk.f_bavail * disk.f_frsize
        if free < nbytes:
            raise self._full(nbytes, free, os.strerror(errno.ENOSPC))
        return free

    def stats(self) -> ArenaStats:
        """Bytes requested, headers included, bytes held, and bytes of the file."""
        return ArenaStats(self.book.requested_bytes, self.book.held_bytes, self.file_bytes, 0)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` with the numbers if the books differ from the slots or the file."""
        self._check_open()
        self.book.check_integrity()
        slots, stats, found = self._slots.values(), self.stats(), os.fstat(self._file.fileno()).st_size
        held = sum(slot.nbytes + HEADER_BYTES for slot in slots), sum(slot.room_bytes for slot in slots)
        if (found, *held) != (stats.actual_bytes, stats.requested_bytes, stats.held_bytes):
            raise RuntimeError(f"the spill file in {self.folder} of {found} bytes, slots of {held}, {stats}")

    def close(self) -> None:
        """Wait for the threads inside `write` and `read`, then give the file back to the disk. May be called again.

        A forked child's call leaves the file to the parent.
        """
        if os.getpid() != self._process:
            self._file.close()
        else:
            with self._idle:
                was_closed, self._closed = self._closed, True
                self._idle.wait_for(lambda: not self._users)
            if not was_closed:
                with suppress(OSError):  # a forked child has the descriptor too, and would keep the bytes
                    os.ftruncate(self._file.fileno(), 0)
                self._file.close()
        self._on_shrink(self.file_bytes)
        self.file_bytes = 0

    def _grow(self) -> None:
        """One more slab, booked before it is there."""
        self._on_grow(self.slab_bytes)
        try:
            self._extend(self.slab_bytes)
        except BaseException:
            self._on_shrink(self.slab_bytes)
            raise
        self.file_bytes += self.slab_bytes
        self.book.add_slabs(1)

    def _extend(self, nbytes: int) -> None:
        """Take `nbytes` more from the disk now, so that no write finds it full; the file stays as it is on an error."""
        descriptor, end = self._file.fileno(), self.file_bytes
        free = self.check_free(nbytes)  # before the attempt, which may fill the disk and then fail
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, end, nbytes)
            else:  # macOS
                _write_all(descriptor, [bytes(nbytes)], end)
        except OSError as error:
            os.ftruncate(descriptor, end)
            if error.errno not in _REFUSED:
                raise self._named(error) from error
            available = free if error.errno == errno.ENOSPC else 0
            raise self._full(nbytes, available, os.strerror(error.errno)) from error

    def _release(self, slot: DiskSlot) -> None:
        self._check_open()
        self.book.release(slot._booked)
        del self._slots[slot.offset]

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                f"the spill file in {self.folder} belongs to process {self._process}: this is a fork of it"
            )
        if self._closed:
            raise ValueError(f"the spill file in {self.folder} is closed")

    @contextmanager
    def _using(self, what: str) -> Iterator[int]:
        """The descriptor, which stays open until the end: the system gives the number of a closed one to other files.
        `what` is named in an error of the system."""
        self._check_open()  # first of all: in a forked child the lock may be held for ever
        with self._idle:
            self._check_open()
            self._users += 1
        try:
            yield self._file.fileno()
        except OSError as error:
            raise TransferError(f"{what}: {error}") from error
        finally:
            with self._idle:
                self._users -= 1
                if not self._users:
                    self._idle.notify_all()

    def _record(self, name: str | bytes, slot: DiskSlot) -> str:
        return f"record {name!r} at offset {slot.offset} of the spill file in {self.folder}"

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, f"disk_path takes no file of records: {error.strerror}", str(self.folder))

    def _full(self, needed: int, available: int, reason: str) -> ArenaFullError:
        disk = os.fstatvfs(self._file.fileno())
        what = f"the disk under disk_path {self.folder}"
        hint = f"{reason} in disk_path {self.folder}: make room there, name another folder, or lower `disk`"
        return ArenaFullError(needed, available, disk.f_blocks * disk.f_frsize, what, hint)


def _buffer(data: UInt8[Tensor, " nbytes"], slot: DiskSlot) -> memoryview:
    if data.dtype != torch.uint8 or data.device.type != "cpu" or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(
            f"a record of shape {tuple(data.shape)}, strides {data.stride()} and type {data.dtype} on {data.device}; "
            "allowed: one contiguous dimension of torch.uint8 on the CPU"
        )
    if data.numel() != slot.nbytes:
        raise ValueError(f"{data.numel()} bytes for a slot of {slot.nbytes}")
    return memoryview(data.numpy())


def _write_all(descriptor: int, buffers: Sequence[Data], offset: int) -> int:
    """Write `buffers` one after another from `offset` on; returns their bytes."""
    count = _moved(os.pwritev, descriptor, buffers, offset)
    if count < sum(memoryview(buffer).nbytes for buffer in buffers):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return count


def _moved(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, buffers: Sequence[Data], offset: int
) -> int:
    """Bytes that `call`, a read or write of the system that may stop short, moved until all were, or it moved none."""
    parts, moved = [memoryview(buffer).cast("B") for buffer in buffers], 0
    while any(parts) and (count := call(descriptor, parts, offset + moved)):
        moved += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]
    return moved
