"""Specialisations of `kernels/encode_rows.py`."""

from specialisation import Compilation

from tiered.kernels.encode_rows import _encode_rows, tile_of, warps_of
from tiered.kernels.row_code import RowCode, RowLayout


def _compilation(dtype: str, code: RowCode, elements: int, *, numbered: bool, residual: bool) -> Compilation:
    tile = tile_of(elements)
    constexprs = {"ROW": RowLayout.of(code, elements, residual=residual), "TILE": tile}
    constexprs |= dict.fromkeys([*["numbers"] * (not numbered), *["bases", "of_row"] * (not residual)])
    return Compilation(
        kernel=_encode_rows,
        types={
            "values bases": f"*{dtype}",
            "coded": "*u8",
            "numbers of_row": "*i64",
            "row_stride base_stride count": "i32",
        },
        constexprs=constexprs,
        multiples="values coded row_stride",
        num_warps=warps_of(tile),
        fp_fusion=False,
    )


COMPILATIONS = (
    _compilation("bf16", RowCode.NVFP4, 4096, numbered=True, residual=True),
    _compilation("fp32", RowCode.NVFP4, 4096, numbered=True, residual=True),
    _compilation("bf16", RowCode.NVFP4, 3584, numbered=True, residual=False),
    *(
        _compilation(dtype, code, elements, numbered=numbered, residual=False)
        for dtype in ("bf16", "fp32")
        for code, elements, numbered in (
            (RowCode.NVFP4, 128, False),
            (RowCode.FP8, 128, False),
            (RowCode.FP8, 4096, True),
        )
    ),
)
