"""The file under the disk tier: whole records by offset, from any thread."""

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

from tiered.offload.errors import ArenaFullError, CorruptRecordError, TransferError
from tiered.offload.spill_record import HEADER_BYTES, Data, find_fault, pack_header

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota, a limit on the length of files


class RecordFile:
    """An empty file without a name: it meets nothing that is in the folder, and goes with the process that has it open.

    `write` and `read` may run on several threads at once. After a fork it is the parent's.

    Args:
        folder: that it takes its room from; a link to one will do.

    Raises:
        OSError: no file can be made there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder
        self._process = os.getpid()
        self._idle = threading.Condition()
        self._users = 0  # threads inside `write` or `read`
        self._closed = False
        try:
            # O_TMPFILE, which does not follow links, or else a new file with a random name that is unlinked at once.
            self._file = TemporaryFile(buffering=0, prefix="tiered-", dir=os.path.realpath(folder))  # noqa: SIM115
        except OSError as error:
            raise self._named(error) from error

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return os.fstat(self._file.fileno()).st_size

    def write(self, offset: int, name: str | bytes, version: int, payload: UInt8[Tensor, " nbytes"]) -> int:
        """Write a record; blocks. Returns the bytes written, header included.

        Raises:
            TransferError: the system could not write.
            ValueError: closed, or a payload that is not contiguous bytes on the CPU.
        """
        data = _buffer(payload)
        header = pack_header(name, version, offset, data)
        with self._using(f"writing {self._record(name, offset)}") as descriptor:
            return _write_all(descriptor, [header, data], offset)

    def read(self, offset: int, name: str | bytes, version: int, into: UInt8[Tensor, " nbytes"]) -> int:
        """Read a record into `into`, whose content is undefined after an error; blocks. Returns the bytes read.

        Raises:
            CorruptRecordError: what is there is not that record, as it was written.
            TransferError: the system could not read.
            ValueError: closed, or `into` is not contiguous bytes on the CPU.
        """
        data, header = _buffer(into), bytearray(HEADER_BYTES)
        whole = HEADER_BYTES + data.nbytes
        with self._using(f"reading {self._record(name, offset)}") as descriptor:
            count = _moved(os.preadv, descriptor, [header, data], offset)
        if count < whole:
            raise CorruptRecordError(f"{self._record(name, offset)}: the file ends after {count} of {whole} bytes")
        if fault := find_fault(header, name, version, offset, data):
            raise CorruptRecordError(f"{self._record(name, offset)}: {fault}")
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

    def grow(self, nbytes: int) -> None:
        """Take `nbytes` more from the disk now, so that no write finds it full. What is there stays.

        Raises:
            ArenaFullError: the disk has no room for them; the file is as long as before.
            OSError: the system refuses for another reason; likewise.
        """
        descriptor, end = self._file.fileno(), self.nbytes
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

    def check_open(self) -> None:
        """Raise ValueError where the file is closed, or another process's."""
        if os.getpid() != self._process:
            raise ValueError(
                f"the spill file in {self.folder} belongs to process {self._process}: this is a fork of it"
            )
        if self._closed:
            raise ValueError(f"the spill file in {self.folder} is closed")

    def close(self) -> None:
        """Wait for the threads inside `write` and `read`, then close; the disk has its bytes back.

        May be called again. A forked child's call changes nothing for the parent.
        """
        if os.getpid() != self._process:
            self._file.close()
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: not self._users)
        with suppress(OSError):  # a forked child has the descriptor too, and would keep them
            os.ftruncate(self._file.fileno(), 0)
        self._file.close()

    @contextmanager
    def _using(self, what: str) -> Iterator[int]:
        """The descriptor, which stays open until the end: the system gives the number of a closed one to other files.
        An error of the system's is told as one of `what`."""
        self.check_open()  # first of all: in a forked child the lock may be held for ever
        with self._idle:
            self.check_open()
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

    def _record(self, name: str | bytes, offset: int) -> str:
        return f"record {name!r} at offset {offset} of the spill file in {self.folder}"

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, f"disk_path takes no file of records: {error.strerror}", str(self.folder))

    def _full(self, needed: int, available: int, reason: str) -> ArenaFullError:
        disk = os.fstatvfs(self._file.fileno())
        what = f"the disk under disk_path {self.folder}"
        hint = f"{reason} in disk_path {self.folder}: make room there, name another folder, or lower `disk`"
        return ArenaFullError(needed, available, disk.f_blocks * disk.f_frsize, what, hint)


def _buffer(data: UInt8[Tensor, " nbytes"]) -> memoryview:
    if data.dtype != torch.uint8 or data.device.type != "cpu" or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(
            f"a record of shape {tuple(data.shape)}, strides {data.stride()} and type {data.dtype} on {data.device}; "
            "allowed: one contiguous dimension of torch.uint8 on the CPU"
        )
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
