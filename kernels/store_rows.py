"""Write keys and values of rows of several calls to the stores of each, in one Triton kernel."""

import triton
import triton.language as tl

from tiered.kernels.launch import launch, row_tile
from tiered.kernels.scatter_rows import TILE_ELEMENTS, WARPS, alignment
from tiered.kernels.store_rows_ref import check_stored
from tiered.kernels.store_table import ROW_FIELDS, SEQUENCE_FIELDS, Stored, StoreTable

_OF_SEQUENCE, _OF_ROW = tl.constexpr(SEQUENCE_FIELDS), tl.constexpr(ROW_FIELDS)


# Arguments that vary between calls are not specialised: Triton would recompile for 1 and for multiples of 16.
@triton.jit(
    do_not_specialize=["key_head", "key_row", "value_head", "value_row", "count"],
    do_not_specialize_on_alignment=["keys", "values", "stores", "rows"],
)
def _store(
    keys, values, stores, rows, key_head, key_row, value_head, value_row, count,
    ELEMENTS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    head = tl.program_id(1).to(tl.int64)
    written = row < count
    fields = rows + row * _OF_ROW
    sequence, column = tl.load(fields, written, other=0), tl.load(fields + 1, written, other=0)
    element = tl.arange(0, TILE.elements)
    own = written[:, None] & (element < ELEMENTS)[None, :]
    is_value = tl.program_id(2)
    source, of_head, of_row = keys, key_head, key_row
    if is_value:
        source, of_head, of_row = values, value_head, value_row
    source_at = tl.multiple_of(source + head * of_head + row.to(tl.int64) * of_row, [ALIGNED])
    moved = tl.load(source_at[:, None] + element[None, :], own)
    at = stores + sequence * _OF_SEQUENCE
    start = tl.load(at + is_value, written, other=0) + head * tl.load(at + 2, written, other=0)
    memory = start.to(tl.pointer_type(keys.dtype.element_ty), bitcast=True)
    target = tl.multiple_of(memory + column * ELEMENTS, [ALIGNED])
    tl.store(target[:, None] + element[None, :], moved, own)


def store_rows(keys: Stored, values: Stored, table: StoreTable, layer: int) -> None:
    """As in store_rows_ref.py."""
    check_stored(keys, values, table)
    keys, values = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (keys, values))
    tile = row_tile(keys.shape[3], TILE_ELEMENTS)
    strides = *keys.stride()[1:3], *values.stride()[1:3]
    grid = -(-keys.shape[2] // tile.rows), keys.shape[1], 2
    tensors = keys, values, table.sequences[layer], table.rows
    aligned = min(table.aligned, alignment(keys), alignment(values))
    options = {"ELEMENTS": keys.shape[3], "ALIGNED": aligned, "TILE": tile, "num_warps": WARPS}
    launch(_store, grid, *tensors, *strides, keys.shape[2], **options, on=keys)
