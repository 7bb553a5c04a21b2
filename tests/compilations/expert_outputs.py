"""Specialisations of `kernels/expert_outputs.py`."""

from specialisation import Compilation

from tiered.kernels.expert_outputs import _CHUNK, _SUM_WARPS, _align, _expert_product, _sum
from tiered.kernels.expert_table import TILE_ROWS
from tiered.kernels.row_code import RowLayout, WeightCode
from tiered.kernels.weight_product import tile_of, warps_of

# LLaDA2-mini's and DiffusionGemma's: width, width of an expert, and its activation.
_SIZES = (2048, 512, "silu"), (2816, 704, "gelu")

COMPILATIONS = (
    *(
        Compilation(
            kernel=_expert_product,
            types={
                "rows product": f"*{dtype}",
                "order tiles": "*i32",
                "addresses": "*i64",
                "picked which out": "i32",
            },
            constexprs={"ACTIVATION": activation, "ROW": row, "UPCAST": False, "TILE": tile},
            multiples="rows addresses product out",
            num_warps=warps_of(tile),
        )
        for dtype, element_bytes, (width, inner, of_gate) in (
            ("bf16", 2, _SIZES[0]),
            ("bf16", 2, _SIZES[1]),
            ("fp16", 2, _SIZES[0]),
            ("fp32", 4, _SIZES[0]),
        )
        for activation, elements in ((of_gate, width), (None, inner))
        for row in (
            *(RowLayout.of(code, elements) for code in reversed(WeightCode)),
            RowLayout.raw(elements, element_bytes),
        )
        for tile in (tile_of(TILE_ROWS, element_bytes),)
    ),
    Compilation(
        kernel=_align,
        types={"experts addresses": "*i64", "order tiles": "*i32", "pairs": "i32"},
        constexprs={"CHUNK": _CHUNK},
        multiples="experts addresses",
    ),
    *(
        Compilation(
            kernel=_sum,
            types={"total outputs": f"*{dtype}", "weights": "*fp32", "picked width": "i32"},
            constexprs={"CHUNK": _CHUNK},
            multiples="total outputs weights width",
            num_warps=_SUM_WARPS,
            fp_fusion=False,
        )
        for dtype in ("bf16", "fp16", "fp32")
    ),
)
