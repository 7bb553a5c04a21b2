"""Specialisations of `kernels/decode_rows.py`."""

from specialisation import Compilation

from tiered.kernels.decode_rows import _decode_rows, tile_of
from tiered.kernels.row_code import RowCode, RowLayout


def _compilation(dtype: str, code: RowCode, width: int, *absent: str) -> Compilation:
    residual = "bases" not in absent
    constexprs = {"ROW": RowLayout.of(code, width, residual=residual), "TILE": tile_of(width)}
    return Compilation(
        kernel=_decode_rows,
        types={
            "coded": "*u8",
            "count base_step out_step size": "i32",
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
