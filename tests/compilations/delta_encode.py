"""Specialisations of `kernels/delta_encode.py`."""

from specialisation import Compilation

from tiered.kernels.delta_encode import BLOCK_GROUPS, BLOCK_ROWS, _encode, _measure
from tiered.kernels.record_layout import GROUP


def _compilation(kernel: object, dtype: str, delta: bool, extra: dict[str, object]) -> Compilation:
    constexprs = {"WIDTH": 4096, "GROUPS": 256, "BLOCK_ROWS": BLOCK_ROWS, **extra}
    if not delta:
        constexprs |= {"centroids": None, "centroid_of_record": None}
    return Compilation(
        kernel=kernel,
        types={
            "rows centroids": f"*{dtype}",
            "row_stride total centroid_stride": "i32",
            "starts at record_of_row centroid_of_record": "*i64",
            "out": "*u8",
            "amax": "*i32",
        },
        constexprs=constexprs,
        fp_fusion=False,
    )


COMPILATIONS = tuple(
    _compilation(kernel, dtype, delta, extra)
    for dtype, delta, project in [
        ("bf16", True, True),
        ("bf16", True, False),
        ("fp32", True, True),
        ("bf16", False, True),
    ]
    for kernel, extra in [
        (_measure, {"PROJECT": project, "BLOCK_COLUMNS": GROUP * BLOCK_GROUPS}),
        (_encode, {"BLOCK_GROUPS": BLOCK_GROUPS}),
    ]
)
