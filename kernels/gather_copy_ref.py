"""Copy segments of bytes from one buffer to another: the oracle, in plain torch."""

from jaxtyping import Int64, UInt8
from torch import Tensor

from tiered.kernels.byte_segments import check_segments


def gather_copy(
    source: UInt8[Tensor, " source_bytes"],
    source_offsets: Int64[Tensor, " segments"],
    destination: UInt8[Tensor, " destination_bytes"],
    destination_offsets: Int64[Tensor, " segments"],
    sizes: Int64[Tensor, " segments"],
    *,
    programs: int = 4,
) -> None:
    """Segment i, `sizes[i]` bytes at `source_offsets[i]`, goes to `destination_offsets[i]`.

    A copy engine needs a descriptor for each segment, and is slow where they are small; this is one launch for all.
    Offsets and sizes are multiples of 16 bytes, both buffers begin at one, and destinations do not overlap. Offsets
    and sizes are checked where they lie in host memory; what puts them on a device calls `check_segments` before.

    Args:
        source: contiguous. With Triton it may be pinned host memory, which the GPU then reads by its address.
        source_offsets: bytes, on the device that copies.
        destination: contiguous; may be pinned host memory as well.
        destination_offsets: bytes, on the device that copies.
        sizes: bytes, on the device that copies.
        programs: thread blocks that copy. A few fill the link and leave the multiprocessors to others. No effect here.

    Raises:
        ValueError: see `check_segments`; no program; a buffer that is not contiguous or, with Triton, not aligned.
    """
    check_copy(source, source_offsets, destination, destination_offsets, sizes, programs)
    segments = zip(source_offsets.tolist(), destination_offsets.tolist(), sizes.tolist(), strict=True)
    for start, place, size in segments:
        destination[place : place + size].copy_(source[start : start + size])


def check_copy(
    source: UInt8[Tensor, " source_bytes"],
    source_offsets: Int64[Tensor, " segments"],
    destination: UInt8[Tensor, " destination_bytes"],
    destination_offsets: Int64[Tensor, " segments"],
    sizes: Int64[Tensor, " segments"],
    programs: int,
) -> None:
    """Raise `ValueError` for what can be seen to be wrong without waiting for a device."""
    if programs < 1:
        raise ValueError(f"programs = {programs}; 1 or more are allowed")
    if not (source.is_contiguous() and destination.is_contiguous()):
        raise ValueError("the buffers of a copy by address must be contiguous")
    if sizes.is_cpu:
        check_segments(
            source_offsets.tolist(),
            destination_offsets.tolist(),
            sizes.tolist(),
            source_bytes=source.numel(),
            destination_bytes=destination.numel(),
        )
