"""Copy segments of bytes with a few programs, in Triton: for records too small for the copy engine."""

import triton
import triton.language as tl
from jaxtyping import Int64, UInt8
from torch import Tensor

from tiered.kernels.byte_segments import ALIGNMENT
from tiered.kernels.gather_copy_ref import check_copy
from tiered.kernels.launch import launch

# A host read over PCIe takes a microsecond or two: to fill a link of 50 GB/s, about 100 KB must be under way at once.
TILE_WORDS = 4096  # 32 KiB a program, 4 loads of 16 bytes a thread
WARPS = 16


# One kernel serves all records: no fetch waits for a compilation, which would hold its lane.
@triton.jit(do_not_specialize=["source", "destination", "segments"])
def _copy_segments(
    source,
    source_offsets,
    destination,
    destination_offsets,
    sizes,
    segments,
    TILE_WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    word = tl.arange(0, TILE_WORDS)
    for segment in range(segments):
        # The compiler has to know that all is aligned, or it moves 8 bytes at a time instead of 16.
        read = (source + tl.load(source_offsets + segment)).to(tl.pointer_type(tl.int64))
        write = (destination + tl.load(destination_offsets + segment)).to(tl.pointer_type(tl.int64))
        read = tl.multiple_of(read, 16)
        write = tl.multiple_of(write, 16)
        words = tl.load(sizes + segment) // 16 * 2
        # The first tile of each segment goes to another program: they share the work where a segment is one tile.
        tile = (program + segment) % programs
        while tile.to(tl.int64) * TILE_WORDS < words:
            at = tile.to(tl.int64) * TILE_WORDS + word
            tl.store(write + at, tl.load(read + at, at < words), at < words)
            tile += programs


def gather_copy(
    source: UInt8[Tensor, " source_bytes"],
    source_offsets: Int64[Tensor, " segments"],
    destination: UInt8[Tensor, " destination_bytes"],
    destination_offsets: Int64[Tensor, " segments"],
    sizes: Int64[Tensor, " segments"],
    *,
    programs: int = 4,
) -> None:
    """As in gather_copy_ref.py."""
    check_copy(source, source_offsets, destination, destination_offsets, sizes, programs)
    for name, buffer in [("source", source), ("destination", destination)]:
        if buffer.data_ptr() % ALIGNMENT:
            raise ValueError(f"the {name} lies at address {buffer.data_ptr()}; multiples of {ALIGNMENT} are allowed")
    if sizes.numel() == 0:
        return
    launch(
        _copy_segments,
        (programs,),
        source.data_ptr(),
        source_offsets.contiguous(),
        destination.data_ptr(),
        destination_offsets.contiguous(),
        sizes.contiguous(),
        sizes.numel(),
        TILE_WORDS=TILE_WORDS,
        num_warps=WARPS,
        on=sizes,
    )
