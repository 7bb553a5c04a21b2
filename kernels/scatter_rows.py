"""Write rows of keys or values into their columns of a layer's store, in Triton: each valid row once, no other."""

from math import gcd

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.kernels.launch import VECTOR, launch, row_tile

TILE_ELEMENTS = 4096  # elements that a program moves; more would not fit its registers
WARPS = 8


# Arguments that vary between calls are not specialised: Triton would recompile for 1 and for multiples of 16. The
# alignment of rows and their size are constants, because coded rows are whole words and no multiples of 16 bytes.
@triton.jit(
    do_not_specialize=[
        *("target_batch", "target_head", "target_column", "value_batch", "value_head", "value_row"),
        *("index_batch", "valid_batch", "rows", "length"),
    ],
    do_not_specialize_on_alignment=["target", "values", "index", "valid"],
)
def _scatter(
    target, values, index, valid,
    target_batch, target_head, target_column, target_element,
    value_batch, value_head, value_row, value_element,
    index_batch, index_row, valid_batch, valid_row, rows, length,
    ELEMENTS: tl.constexpr, MASKED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    written = row < rows
    column = tl.load(index + batch * index_batch + row * index_row, written, other=0).to(tl.int64)
    if MASKED:
        written &= tl.load(valid + batch * valid_batch + row * valid_row, written, other=0) != 0
    # A column out of range is a caller's error, but must not write outside the store.
    written &= (column >= 0) & (column < length)
    element = tl.arange(0, TILE.elements)
    mask = written[:, None] & (element < ELEMENTS)[None, :]
    value_at = batch * value_batch + head * value_head + row.to(tl.int64) * value_row
    value_start = tl.multiple_of(values + value_at, [ALIGNED])
    value = tl.load(value_start[:, None] + (element * value_element)[None, :], mask)
    target_at = batch * target_batch + head * target_head + column * target_column
    target_start = tl.multiple_of(target + target_at, [ALIGNED])
    tl.store(target_start[:, None] + (element * target_element)[None, :], value, mask)


def scatter_rows(
    target: Float[Tensor, "batch heads length elements"],
    values: Float[Tensor, "batch heads rows elements"],
    index: Int[Tensor, "batch rows"],
    valid: Bool[Tensor, "batch rows"] | None = None,
) -> None:
    """As in scatter_rows_ref.py."""
    batch, heads, length, elements = target.shape
    rows = index.shape[1]
    if values.shape != (batch, heads, rows, elements) or values.dtype != target.dtype:
        raise ValueError(
            f"values {tuple(values.shape)} of {values.dtype} do not fit target {tuple(target.shape)} of {target.dtype} "
            f"with {rows} rows"
        )
    if values.numel() == 0:
        return
    tile = row_tile(elements, TILE_ELEMENTS)
    # Without flags the kernel reads none, so any pointer serves.
    flags = index if valid is None else valid.view(torch.uint8)
    tensors = target, values, index, flags
    strides = [stride for tensor in tensors for stride in tensor.stride()]
    aligned = min(alignment(target), alignment(values))
    options = {"ELEMENTS": elements, "MASKED": valid is not None, "ALIGNED": aligned, "TILE": tile}
    grid = -(-rows // tile.rows), heads, batch
    launch(_scatter, grid, *tensors, *strides, rows, length, **options, num_warps=WARPS, on=target)


def alignment(rows: Tensor) -> int:
    """Bytes of which each row's address is a multiple, at most a row's whole vectors or words, so that all calls of a
    model agree."""
    nbytes = (number * rows.element_size() for number in (rows.shape[3], *rows.stride()[:3]))
    return gcd(VECTOR, rows.data_ptr(), *nbytes)
