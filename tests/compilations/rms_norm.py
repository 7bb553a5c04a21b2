"""Specialisations of `kernels/rms_norm.py`."""

from specialisation import Compilation

from tiered.kernels.launch import warps_of_row
from tiered.kernels.rms_norm import _rms_norm

COMPILATIONS = tuple(
    Compilation(
        kernel=_rms_norm,
        types={"hidden branch weight normed": f"*{dtype}", "batch_step row_step rows width": "i32", "eps": "fp32"},
        constexprs={"OFFSET": offset, "BLOCK": block} | of_weight,
        num_warps=warps_of_row(block),
    )
    for dtype, block, offset, of_weight in [
        ("bf16", 4096, None, {}),
        ("bf16", 4096, 1.0, {}),
        ("fp16", 4096, None, {}),
        ("fp32", 4096, None, {}),
        ("bf16", 8192, None, {}),
        ("fp32", 8192, 1.0, {}),
        ("fp32", 64, None, {}),
        ("bf16", 256, 0.0, {}),
        ("bf16", 256, None, {"weight": None}),
    ]
)
