"""Specialisations of `kernels/silu_mul.py`."""

from specialisation import Compilation

from tiered.kernels.silu_mul import TILE, _silu_mul

COMPILATIONS = tuple(
    Compilation(
        kernel=_silu_mul,
        types={"gate up product": f"*{dtype}", "total": "i32"},
        constexprs={"TILE": TILE},
    )
    for dtype in ("bf16", "fp16", "fp32")
)
