"""Specialisations of `kernels/store_rows.py`."""

from specialisation import Compilation

from tiered.kernels.launch import VECTOR, row_tile
from tiered.kernels.row_code import WORD
from tiered.kernels.store_rows import TILE_ELEMENTS, WARPS, _store

COMPILATIONS = tuple(
    Compilation(
        kernel=_store,
        types={
            "keys values": f"*{dtype}",
            "stores rows": "*i64",
            "key_head key_row value_head value_row count": "i32",
        },
        constexprs={
            "ELEMENTS": elements,
            "ALIGNED": WORD if coded else VECTOR,
            "TILE": row_tile(elements, TILE_ELEMENTS),
        },
        num_warps=WARPS,
    )
    # Keys and values as they are, and in fp8 in elements of the model.
    for dtype, elements, coded in (("bf16", 128, False), ("fp32", 128, False), ("bf16", 66, True))
)
