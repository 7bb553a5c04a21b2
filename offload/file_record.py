"""A record whose bytes are in foreign files, such as a checkpoint's: read when needed, never written."""

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.errors import CorruptRecordError, TransferError
from tiered.offload.fence import Fence, Region


class ReadFile:
    """A file that stays open for reading, even if another file takes its name later. Raises `OSError` if it cannot be
    opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._then = self._state()
        weakref.finalize(self, self._file.close)

    def read(self, offset: int, into: UInt8[Tensor, " nbytes"]) -> None:
        """Fill `into` from `offset` on; blocks. On any thread. Raises `CorruptRecordError` if the file was written to
        since it was opened, or ends too early, and `TransferError` if the system could not read."""
        buffer = memoryview(into.numpy())
        try:
            done = moved(read_into, self._file.fileno(), buffer, offset)
            changed = self._state() != self._then  # checked after the read, because the file may change during it
        except OSError as error:
            raise TransferError(f"reading {self.path}: {error}") from error
        if changed or done < len(buffer):
            raise CorruptRecordError(f"{self.path} has changed since it was loaded: load it again")

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class FilePiece:
    """`nbytes` bytes from `offset` of a file, which belong at `start` of a record."""

    file: ReadFile
    offset: int
    nbytes: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class FileRecord:
    """A record of `nbytes` made of `pieces`; bytes outside all pieces are undefined. `fence` guards its reads."""

    nbytes: int
    pieces: Sequence[FilePiece]
    fence: Fence = field(default_factory=lambda: Fence(Region.DISK_SLOT))

    def read(self, into: UInt8[Tensor, " nbytes"]) -> int:
        """Read the record into `into`; blocks. Returns the bytes read. Raises as `ReadFile.read`."""
        for piece in self.pieces:
            piece.file.read(piece.offset, into[piece.start : piece.start + piece.nbytes])
        return sum(piece.nbytes for piece in self.pieces)


def moved(call: Callable[[int, memoryview, int], int], descriptor: int, data: memoryview, offset: int) -> int:
    """Repeat `call`, a read or write of the system that may stop short, until it has moved all bytes or moves none.
    Returns the bytes moved."""
    done = 0
    while done < len(data) and (count := call(descriptor, data[done:], offset + done)):
        done += count
    return done


def read_into(descriptor: int, data: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [data], offset)
