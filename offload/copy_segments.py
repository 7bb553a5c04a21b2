"""Books: spans of bytes to copy from one buffer to another."""

from collections.abc import Iterable
from typing import NamedTuple


class Segment(NamedTuple):
    """Bytes to copy between two buffers: `size` bytes from offset `source` to offset `destination`."""

    source: int
    destination: int
    size: int


def merge_neighbours(segments: Iterable[tuple[int, int, int]]) -> list[Segment]:
    """The same bytes in as few segments as possible: segments that touch on both sides become one, and empty ones are
    left out. `segments`: (source, destination, size) in bytes, in the order of their sources."""
    merged: list[Segment] = []
    for source, destination, size in segments:
        before = merged[-1] if merged else Segment(0, 0, 0)
        if before.size and (before.source + before.size, before.destination + before.size) == (source, destination):
            merged[-1] = before._replace(size=before.size + size)
        elif size:
            merged.append(Segment(source, destination, size))
    return merged
