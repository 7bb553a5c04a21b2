"""Specialisations of `kernels/delta_decode.py`."""

from specialisation import Compilation

from tiered.kernels.delta_decode import BLOCK_GROUPS, BLOCK_ROWS, _decode
from tiered.kernels.record_layout import GROUP


def _compilation(dtype: str, width: int, absent: tuple[str, ...]) -> Compilation:
    constexprs = {"WIDTH": width, "GROUPS": width // GROUP, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_GROUPS": BLOCK_GROUPS}
    constexprs |= dict.fromkeys(absent)
    return Compilation(
        kernel=_decode,
        types={
            "buffer": "*u8",
            "total centroid_stride out_stride out_size": "i32",
            "starts at record_of_row centroid_of_record out_rows": "*i64",
            "centroids out": f"*{dtype}",
        },
        constexprs=constexprs,
        fp_fusion=False,
    )


COMPILATIONS = (
    _compilation("bf16", 4096, ()),
    _compilation("bf16", 3584, ()),
    _compilation("fp32", 4096, ("out_rows",)),
    _compilation("bf16", 4096, ("centroids", "centroid_of_record")),
)
