"""Specialisations of `kernels/weight_product.py`."""

from specialisation import Compilation

from tiered.kernels.row_code import RowLayout, WeightCode
from tiered.kernels.weight_product import DECODED, _decode_weight, _weight_product, tile_of, warps_of

COMPILATIONS = (
    *(
        Compilation(
            kernel=_decode_weight,
            types={"coded": "*u8", "values": f"*{dtype}", "out": "i32"},
            constexprs={"ROW": RowLayout.of(code, inner), "TILE": DECODED},
            multiples="coded values out",
        )
        for dtype, inner in (("bf16", 4096), ("bf16", 12288), ("fp16", 4096), ("fp32", 4096))
        for code in WeightCode
    ),
    *(
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
    ),
)
