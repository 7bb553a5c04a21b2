"""The file under the disk tier: whole records by offset, from any thread."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.errors import ArenaFullError, CorruptRecordError, TransferError
from tiered.offload.file_io import read_all, write_all
from tiered.offload.locked_file import open_locked, unlock
from tiered.offload.spill_record import HEADER_BYTES, find_fault, pack_header

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RecordFile:
    """An open, locked file. `write` and `read` may run on several threads at once; after a fork it is the parent's.

    Args:
        path: of the file.
        create: make it where it is missing.

    Raises:
        ValueError: it cannot be opened, or is open elsewhere.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self._process = os.getpid()
        self._idle = threading.Condition()
        self._users = 0  # threads inside `write` or `read`
        self._closed = False
        self._file = os.fdopen(open_locked(path, create=create), "r+b", buffering=0)

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return os.fstat(self._file.fileno()).st_size

    def write(self, offset: int, name: str | bytes, version: int, payload: UInt8[Tensor, " nbytes"]) -> int:
        """Write a record; blocks. Returns the bytes written, header included.

        Raises:
            ArenaFullError: the disk is full.
            TransferError: the system could not write.
            ValueError: closed, or a payload that is not contiguous bytes on the CPU.
        """
        data = _buffer(payload)
        header = pack_header(name, version, offset, data)
        with self._using() as descriptor:
            try:
                return write_all(descriptor, [header, data], offset)
            except OSError as error:
                if error.errno in _DISK_FULL:
                    raise self._full(HEADER_BYTES + data.nbytes) from error
                raise TransferError(f"writing {self._record(name, offset)}: {error}") from error

    def read(self, offset: int, name: str | bytes, version: int, into: UInt8[Tensor, " nbytes"]) -> int:
        """Read a record into `into`, whose content is undefined after an error; blocks. Returns the bytes read.

        Raises:
            CorruptRecordError: what is there is not that record, as it was written.
            TransferError: the system could not read.
            ValueError: closed, or `into` is not contiguous bytes on the CPU.
        """
        data, header = _buffer(into), bytearray(HEADER_BYTES)
        whole = HEADER_BYTES + data.nbytes
        with self._using() as descriptor:
            try:
                count = read_all(descriptor, [header, data], offset)
            except OSError as error:
                raise TransferError(f"reading {self._record(name, offset)}: {error}") from error
        if count < whole:
            raise CorruptRecordError(f"{self._record(name, offset)}: the file ends after {count} of {whole} bytes")
        if fault := find_fault(header, name, version, offset, data):
            raise CorruptRecordError(f"{self._record(name, offset)}: {fault}")
        return count

    def preallocate(self, nbytes: int) -> None:
        """Take `nbytes` from the disk now, so that no write finds it full. What is there stays.

        Raises:
            ArenaFullError: the disk has no room for them.
        """
        try:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            raise self._full(nbytes) from error

    def truncate(self) -> None:
        """Drop everything."""
        os.ftruncate(self._file.fileno(), 0)

    def sync(self) -> None:
        """Return once everything that was written is on the disk."""
        os.fdatasync(self._file.fileno())

    def check_open(self) -> None:
        """Raise ValueError where the file is closed, or another process's."""
        if os.getpid() != self._process:
            raise ValueError(f"spill file {self.path} belongs to process {self._process}: this is a fork of it")
        if self._closed:
            raise ValueError(f"spill file {self.path} is closed")

    def close(self, delete: tuple[Path, ...] = ()) -> None:
        """Wait for the threads inside `write` and `read`, delete those files under our lock, and close.

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
        try:
            for path in delete:
                path.unlink(missing_ok=True)
        finally:
            unlock(self._file.fileno())
            self._file.close()

    @contextmanager
    def _using(self) -> Iterator[int]:
        """The descriptor, which stays ours until the end: the system gives the number of a closed one to others."""
        self.check_open()  # first of all: in a forked child the lock may be held for ever
        with self._idle:
            self.check_open()
            self._users += 1
        try:
            yield self._file.fileno()
        finally:
            with self._idle:
                self._users -= 1
                if not self._users:
                    self._idle.notify_all()

    def _record(self, name: str | bytes, offset: int) -> str:
        return f"record {name!r} at offset {offset} of {self.path}"

    def _full(self, needed: int) -> ArenaFullError:
        disk = os.fstatvfs(self._file.fileno())
        available, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        return ArenaFullError(needed, available, whole, f"the disk under disk_path {self.path} (lower disk)")


def _buffer(data: UInt8[Tensor, " nbytes"]) -> memoryview:
    if data.dtype != torch.uint8 or data.device.type != "cpu" or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(
            f"a record of shape {tuple(data.shape)}, strides {data.stride()} and type {data.dtype} on {data.device}; "
            "allowed: one contiguous dimension of torch.uint8 on the CPU"
        )
    return memoryview(data.numpy())
