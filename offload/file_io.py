"""Reads and writes at a place in a file that carry on where the system stops short. The GIL is released meanwhile."""

import errno
import os
from collections.abc import Iterable

Data = bytes | bytearray | memoryview


def write_all(descriptor: int, buffers: Iterable[Data], offset: int) -> int:
    """Write `buffers` one after another from `offset` on; returns their bytes.

    Raises:
        OSError: as the system says.
    """
    parts, written = _parts(buffers), 0
    while parts:
        count = os.pwritev(descriptor, parts, offset + written)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written += count
        parts = _rest(parts, count)
    return written


def read_all(descriptor: int, buffers: Iterable[Data], offset: int) -> int:
    """Fill `buffers` one after another from `offset` on; returns the bytes read, fewer only at the end of the file.

    Raises:
        OSError: as the system says.
    """
    parts, read = _parts(buffers), 0
    while parts and (count := os.preadv(descriptor, parts, offset + read)):
        read += count
        parts = _rest(parts, count)
    return read


def _parts(buffers: Iterable[Data]) -> list[memoryview]:
    return [part for buffer in buffers if (part := memoryview(buffer).cast("B"))]


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """`parts` without their first `count` bytes; none of them is empty, before or after."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []
