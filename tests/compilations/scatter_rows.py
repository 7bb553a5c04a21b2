"""Specialisations of `kernels/scatter_rows.py`."""

from specialisation import Compilation

from tiered.kernels.launch import VECTOR, row_tile
from tiered.kernels.row_code import WORD
from tiered.kernels.scatter_rows import TILE_ELEMENTS, WARPS, _scatter

_STRIDES = "target_batch target_head target_column value_batch value_head value_row index_batch valid_batch"
COMPILATIONS = tuple(
    Compilation(
        kernel=_scatter,
        types={
            "target values": f"*{dtype}",
            "index": "*i64",
            "valid": "*u8",
            f"{_STRIDES} rows length": "i32",
        },
        constexprs={
            **dict.fromkeys(["target_element", "value_element", "index_row", "valid_row"], 1),
            "ELEMENTS": elements,
            "MASKED": masked,
            "ALIGNED": VECTOR if dtype != "u8" else WORD,
            "TILE": row_tile(elements, TILE_ELEMENTS),
        },
        num_warps=WARPS,
        byte_loads=4 if masked else 0,
    )
    # Keys and values, and hidden states.
    for dtype, elements, masked in [
        ("bf16", 128, True),
        ("bf16", 128, False),
        ("fp32", 256, True),
        ("bf16", 4096, True),
        ("bf16", 4096, False),
        ("fp32", 4096, True),
        # Rows in codes.
        ("u8", 132, True),
    ]
)
