"""Books: the byte segments of a batched copy. Integers only."""

from collections.abc import Sequence
from itertools import pairwise

ALIGNMENT = 16  # bytes that one thread of a GPU moves at once


def check_segments(
    source_offsets: Sequence[int],
    destination_offsets: Sequence[int],
    sizes: Sequence[int],
    *,
    source_bytes: int,
    destination_bytes: int,
) -> None:
    """Check that segment i, of `sizes[i]` bytes, can go from `source_offsets[i]` to `destination_offsets[i]` in
    buffers of these many bytes, in any order and at the same time.

    Raises:
        ValueError: lists of different lengths; an offset or size that is negative or no multiple of 16; a segment that
            leaves its buffer; two destinations that overlap.
    """
    if not len(source_offsets) == len(destination_offsets) == len(sizes):
        raise ValueError(
            f"{len(source_offsets)} source offsets, {len(destination_offsets)} destination offsets and "
            f"{len(sizes)} sizes; one of each for a segment is allowed"
        )
    for name, values in [
        ("source_offsets", source_offsets),
        ("destination_offsets", destination_offsets),
        ("sizes", sizes),
    ]:
        for i, value in enumerate(values):
            if value < 0 or value % ALIGNMENT:
                raise ValueError(f"{name}[{i}] = {value}; multiples of {ALIGNMENT} from 0 up are allowed")
    for name, offsets, limit in [
        ("source", source_offsets, source_bytes),
        ("destination", destination_offsets, destination_bytes),
    ]:
        for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            if offset + size > limit:
                raise ValueError(f"segment {i} ends at byte {offset + size} of a {name} of {limit} bytes")
    written = sorted((offset, size) for offset, size in zip(destination_offsets, sizes, strict=True) if size)
    for (offset, size), (following, _) in pairwise(written):
        if offset + size > following:
            raise ValueError(f"destinations overlap: {size} bytes at {offset} and more at {following}")
