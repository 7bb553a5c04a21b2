"""Specialisations of `kernels/rms_norm.py`."""

from specialisation import Compilation

from tiered.kernels.rms_norm import _rms_norm, _warps

COMPILATIONS = tuple(
    Compilation(
        kernel=_rms_norm,
        types={"hidden weight normed": f"*{dtype}", "batch_step row_step rows width": "i32", "eps": "fp32"},
        constexprs={"ZERO_CENTRED": zero_centred, "BLOCK": block},
        num_warps=_warps(block),
    )
    for dtype, block, zero_centred in [
        ("bf16", 4096, False),
        ("bf16", 4096, True),
        ("fp16", 4096, False),
        ("fp32", 4096, False),
        ("bf16", 8192, False),
        ("fp32", 8192, True),
        ("fp32", 64, False),
    ]
)
