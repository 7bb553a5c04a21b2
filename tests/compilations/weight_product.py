"""Specialisations of `kernels/weight_product.py`."""

from specialisation import Compilation

from tiered.kernels.row_code import RowLayout, WeightCode
from tiered.kernels.weight_product import _weight_product, tile_of, warps_of

COMPILATIONS = tuple(
    Compilation(
        kernel=_weight_product,
        types={
            "rows product": f"*{dtype}",
            "coded": "*u8",
            "count out": "i32",
        },
        constexprs={"ROW": RowLayout.of(code, inner), "UPCAST": False, "TILE": tile},
        multiples="rows coded product out",
        num_warps=warps_of(tile),
    )
    for dtype, element_bytes, count, inner in (
        ("bf16", 2, 32, 4096),
        ("bf16", 2, 32, 12288),
        ("bf16", 2, 1, 4096),
        ("bf16", 2, 4096, 4096),
        ("fp16", 2, 64, 4096),
        ("fp32", 4, 32, 4096),
    )
    for code in WeightCode
    for tile in (tile_of(count, element_bytes),)
)
