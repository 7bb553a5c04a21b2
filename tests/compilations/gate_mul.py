"""Specialisations of `kernels/gate_mul.py`."""

from specialisation import Compilation

from tiered.kernels.gate_mul import TILE, _gate_mul

COMPILATIONS = tuple(
    Compilation(
        kernel=_gate_mul,
        types={"gate up product": f"*{dtype}", "gate_row up_row width": "i32"},
        multiples="gate up product gate_row up_row width",
        constexprs={"ACTIVATION": activation, "TILE": TILE},
    )
    for dtype in ("bf16", "fp16", "fp32")
    for activation in ("gelu", "silu")
)
