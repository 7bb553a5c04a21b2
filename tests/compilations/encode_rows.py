"""Specialisations of `kernels/encode_rows.py`."""

from specialisation import Compilation

from tiered.kernels.encode_rows import _encode_rows, tile_of

COMPILATIONS = tuple(
    Compilation(
        kernel=_encode_rows,
        types={"values": f"*{dtype}", "coded": "*u8", "count": "i32"},
        constexprs={"FP8": fp8, "ELEMENTS": elements, "ROW_BYTES": row_bytes, **tile_of(elements)},
        multiples="values coded",
        fp_fusion=False,
    )
    for dtype in ("bf16", "fp32")
    for fp8, elements, row_bytes in ((False, 128, 76), (True, 128, 132), (True, 4096, 4100))
)
