"""Specialisations of `kernels/turn_directions.py`."""

from specialisation import Compilation

from tiered.kernels.launch import power_of_2, warps_of_row
from tiered.kernels.turn_directions import _turn_directions

COMPILATIONS = tuple(
    Compilation(
        kernel=_turn_directions,
        types={
            "directions summed inverse turned": "*fp32",
            "empty": "*u8",
            "picks": "*i64",
            "rows": f"*{dtype}",
            "clusters width row_group row_step inverse_group": "i32",
            "least": "fp32",
        },
        constexprs={"BLOCK": power_of_2(width)},
        num_warps=warps_of_row(power_of_2(width)),
        byte_loads=1,  # a flag
    )
    for width in (4096, 3584, 8192, 128)
    for dtype in ("bf16", "fp32")
)
