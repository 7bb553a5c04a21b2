"""Coded rows to values in one Triton kernel, each added to its base."""

import triton
import triton.language as tl
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.launch import RowTile, launch, power_of_2
from tiered.kernels.row_base import RowBase, base_arguments
from tiered.kernels.row_bits import bf16_values, byte_at, fp8_values, nvfp4_values, row_scales
from tiered.kernels.row_code import WORD, Code, RowLayout

BLOCK_ROWS = 4
MOST_ELEMENTS = 1024  # of a row in a program


# Arguments that vary between calls are not specialised: Triton would recompile for 1 and for multiples of 16.
@triton.jit(
    do_not_specialize=["count", "size"], do_not_specialize_on_alignment=["coded", "numbers", "of_row", "places"]
)
def _decode_rows(
    coded, numbers, bases, base_step, of_row, out, out_step, size, places, count, ROW: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    there = row < count
    element = tl.program_id(1) * TILE.elements + tl.arange(0, TILE.elements)
    own = there[:, None] & (element < ROW.elements)[None, :]
    source = row
    if numbers is not None:
        source = tl.load(numbers + row, there, other=0)
    # The hint that rows are whole words lets the compiler load several codes at once.
    start = tl.multiple_of(coded + source * ROW.row_bytes, [4])
    scale = row_scales(byte_at(start, ROW.scale_at, there))
    if ROW.fp8:
        values = fp8_values(tl.load(start[:, None] + element[None, :], own, other=0)) * scale[:, None]
    else:
        groups: tl.constexpr = TILE.elements // 16
        group = tl.program_id(1) * groups + tl.arange(0, groups)
        filled = there[:, None] & (group < ROW.code_bytes // 8)[None, :]
        byte = (group * 8)[:, None] + tl.arange(0, 8)[None, :]
        codes = tl.load(start[:, None, None] + byte[None, :, :], filled[:, :, None], other=0)
        block_scales = byte_at(start[:, None], (ROW.code_bytes + group)[None, :], filled)
        even, odd = nvfp4_values(codes, block_scales, scale, TILE.rows, groups)
        values = tl.interleave(even, odd)
    if bases is not None:
        base_row = bases + tl.load(of_row + row, there, other=0) * base_step
        base = tl.load(base_row[:, None] + element[None, :], own, other=0.0).to(tl.float32)
        along = tl.load((start + (ROW.row_bytes - 2)).to(tl.pointer_type(tl.uint16)), there, other=0)
        values += bf16_values(along)[:, None] * base
    target = row
    if places is not None:
        target = tl.load(places + row, there, other=0)
    # A row out of range is a caller's error, but must not write outside `out`.
    own &= ((target >= 0) & (target < size))[:, None]
    tl.store(out + (target * out_step)[:, None] + element[None, :], values.to(out.dtype.element_ty), own)


def decode_rows(
    coded: UInt8[Tensor, "rows row_bytes"],
    code: Code,
    out: Float[Tensor, "out_rows elements"],
    numbers: Int64[Tensor, " n"] | None = None,
    places: Int64[Tensor, " n"] | None = None,
    base: RowBase | None = None,
) -> None:
    """As in decode_rows_ref.py, for the codes of `RowCode`. Triton takes a pinned host tensor for `coded` like one on
    the device, by its address on the device. It raises ValueError for pageable memory, and for rows that begin at no
    multiple of 4 bytes."""
    elements, count = out.shape[1], len(coded) if numbers is None else len(numbers)
    if not count:
        return
    if coded.data_ptr() % WORD:
        raise ValueError(f"rows in {code} must begin at multiples of {WORD} bytes")
    tile, row = tile_of(elements), RowLayout.of(code, elements, residual=base is not None)
    grid = -(-count // tile.rows), -(-elements // tile.elements)
    arguments = coded, numbers, *base_arguments(base), out, out.stride(0), len(out), places, count
    launch(_decode_rows, grid, *arguments, ROW=row, TILE=tile, enable_fp_fusion=False, on=out)


def tile_of(elements: int) -> RowTile:
    return RowTile(BLOCK_ROWS, min(MOST_ELEMENTS, max(16, power_of_2(elements))))
