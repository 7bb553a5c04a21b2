"""Specialisations of `kernels/proxy_widen.py`."""

from specialisation import Compilation

from tiered.kernels.proxy_attention import WARPS, parts_block
from tiered.kernels.proxy_widen import _widen

_STRIDES = "query_batch query_head query_cluster key_batch key_head key_column index_batch index_row columns_batch"
_SIZES = "columns_row valid_batch valid_row updating_batch group clusters changing extra parts length"
COMPILATIONS = tuple(
    Compilation(
        kernel=_widen,
        types={
            "queries keys": f"*{dtype}",
            "index columns part_of old_columns old_sizes new_columns new_sizes": "*i64",
            "valid updating": "*u8",
            "old_scores old_peaks old_masses new_scores new_peaks new_masses": "*fp32",
            f"{_STRIDES} {_SIZES} head_dim": "i32",
            "scale soft_cap": "fp32",
        },
        constexprs={
            "query_element": 1,
            "key_element": 1,
            "INDEXED": flagged,
            "VALID": flagged,
            "UPDATING": flagged,
            "CAPPED": capped,
            "UPCAST": False,
            "BLOCK_ROWS": block,
            "BLOCK_KEYS": block,
            "BLOCK_PARTS": parts_block(parts),
            "BLOCK_ELEMENTS": 128,
        },
        num_warps=WARPS // 2 if block == 16 else WARPS,
    )
    for dtype, block, parts, capped, flagged in [
        ("bf16", 32, 17, False, True),
        ("bf16", 32, 9, False, False),
        ("bf16", 32, 1, False, True),
        ("bf16", 32, 18, True, True),
        ("fp32", 16, 18, True, True),
        ("fp32", 16, 1, False, True),
    ]
)
