"""Specialisations of `kernels/rotate.py`."""

from specialisation import Compilation

from tiered.kernels.rotate import _rotate, tile_of

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
        constexprs={"HALF": half, "SCATTERED": scattered, "TILE": tile_of(half)},
        fp_fusion=False,
    )
    for dtype, half, scattered in [
        ("bf16", 64, True),
        ("bf16", 64, False),
        ("fp16", 64, True),
        ("fp32", 64, True),
        ("fp32", 12, True),
    ]
)
