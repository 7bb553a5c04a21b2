"""Specialisations of `kernels/rotate.py`."""

from specialisation import Compilation

from tiered.kernels.launch import row_tile
from tiered.kernels.rotate import TILE_PAIRS, _rotate

_STRIDES = "heads_batch heads_head heads_row table_batch table_row column_batch column_row"
COMPILATIONS = tuple(
    Compilation(
        kernel=_rotate,
        types={
            "heads rotated" + " queries_weight keys_weight" * normed: f"*{dtype}",
            "cos sin": "*fp32",
            "columns": "*i64" if scattered else "*fp32",
            f"{_STRIDES} rows length first_heads": "i32",
            "eps": "fp32",
        },
        constexprs={"HALF": half, "SCATTERED": scattered, "OFFSET": offset, "TILE": row_tile(half, TILE_PAIRS)}
        | ({} if normed else {"queries_weight": None, "keys_weight": None}),
        fp_fusion=False,
    )
    for dtype, half, scattered, normed, offset in [
        ("bf16", 64, True, True, None),
        ("bf16", 64, True, False, None),
        ("bf16", 64, False, False, None),
        ("fp16", 64, True, False, None),
        ("fp32", 64, True, False, None),
        ("fp32", 12, True, False, None),
        ("bf16", 64, False, True, None),
        ("bf16", 32, False, True, 1.0),
        ("fp32", 64, True, True, None),
    ]
)
