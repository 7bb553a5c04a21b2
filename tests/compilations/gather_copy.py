"""Specialisations of `kernels/gather_copy.py`."""

from specialisation import Compilation

from tiered.kernels.gather_copy import TILE_WORDS, WARPS, _copy_segments

COMPILATIONS = (
    Compilation(
        kernel=_copy_segments,
        types={"source destination": "i64", "source_offsets destination_offsets sizes": "*i64", "segments": "i32"},
        constexprs={"TILE_WORDS": TILE_WORDS},
        num_warps=WARPS,
    ),
)
