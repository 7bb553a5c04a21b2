"""Specialisations of `kernels/weight_product.py`."""

from specialisation import Compilation

from tiered.kernels.row_code import RowLayout, WeightCode
from tiered.kernels.weight_product import (
    ADDED,
    DECODED,
    _add_splits,
    _decode_weight,
    _weight_product,
    tile_of,
    warps_of,
)

COMPILATIONS = (
    Compilation(
        kernel=_add_splits,
        types={"parts": "*fp32", "product": "*bf16", "numbers splits": "i32"},
        constexprs={"NUMBERS": ADDED},
        multiples="parts product",
    ),
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
            types={"rows": f"*{dtype}", "coded": "*u8", "product": "*fp32" if split else f"*{dtype}"}
            | {"count out turns" if split else "count out": "i32"},
            constexprs={"ROW": RowLayout.of(code, inner), "UPCAST": False, "TILE": tile}
            | ({} if split else {"turns": None}),
            multiples="rows coded product out",
            num_warps=warps_of(tile),
        )
        for dtype, element_bytes, count, inner, split in (
            ("bf16", 2, 32, 4096, False),
            ("bf16", 2, 32, 12288, True),
            ("bf16", 2, 1, 4096, True),
            ("bf16", 2, 4096, 4096, False),
            ("fp16", 2, 32, 4096, True),
            ("fp16", 2, 64, 4096, False),
            ("fp32", 4, 32, 4096, False),
            ("fp32", 4, 8, 4096, True),
        )
        for code in WeightCode
        for tile in (tile_of(count, element_bytes),)
    ),
)
