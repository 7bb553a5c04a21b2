"""Specialisations of `kernels/far_rows.py`."""

from specialisation import Compilation

from tiered.kernels.far_rows import TILE, WARPS, _far_rows

COMPILATIONS = (
    Compilation(
        kernel=_far_rows,
        types={
            "rank": "*fp32",
            "empty": "*u8",
            "order picks": "*i64",
            "rows clusters": "i32",
            "share apart": "fp32",
        },
        constexprs={"TILE": TILE},
        num_warps=WARPS,
        byte_loads=16,  # flags
    ),
)
