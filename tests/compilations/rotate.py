"""Specialisations of `kernels/rotate.py`."""

from specialisation import Compilation

from tiered.kernels.rotate import TILE, _rotate

_STRIDES = "heads_batch heads_head heads_row table_batch table_row column_batch column_row"
COMPILATIONS = tuple(
    Compilation(
        kernel=_rotate,
        types={
            "heads rotated": f"*{dtype}",
            "cos sin": "*fp32",
            "columns": "*i64" if scattered else "*fp32",
            f"{_STRIDES} rows length": "i32",
        },
        constexprs={
            "HALF": half,
            "SCATTERED": scattered,
            "BLOCK_ROWS": TILE // block_half,
            "BLOCK_HALF": block_half,
        },
        fp_fusion=False,
    )
    for dtype, half, block_half, scattered in [
        ("bf16", 64, 64, True),
        ("bf16", 64, 64, False),
        ("fp16", 64, 64, True),
        ("fp32", 64, 64, True),
        ("fp32", 12, 16, True),
    ]
)
