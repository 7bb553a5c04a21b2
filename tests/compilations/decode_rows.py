"""Specialisations of `kernels/decode_rows.py`."""

from specialisation import Compilation

from tiered.kernels.decode_rows import _decode_rows, tile_of
from tiered.kernels.row_code import RowCode


def _compilation(dtype: str, code: RowCode, width: int, *absent: str) -> Compilation:
    residual = "bases" not in absent
    constexprs = {"FP8": code == RowCode.FP8, "ELEMENTS": width, **tile_of(width)}
    constexprs["ROW_BYTES"] = code.row_bytes(width, residual=residual)
    return Compilation(
        kernel=_decode_rows,
        types={
            "coded": "*u8",
            "count base_stride out_stride out_size": "i32",
            "numbers of_row places": "*i64",
            "bases out": f"*{dtype}",
        },
        constexprs=constexprs | dict.fromkeys(absent),
        fp_fusion=False,
    )


COMPILATIONS = (
    _compilation("bf16", RowCode.NVFP4, 4096),
    _compilation("bf16", RowCode.NVFP4, 3584),
    _compilation("fp32", RowCode.NVFP4, 4096, "places"),
    _compilation("bf16", RowCode.NVFP4, 4096, "bases", "of_row"),
    _compilation("bf16", RowCode.FP8, 4096, "bases", "of_row"),
    _compilation("bf16", RowCode.NVFP4, 128, "numbers", "bases", "of_row", "places"),
)
