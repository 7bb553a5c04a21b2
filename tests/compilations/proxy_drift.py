"""Specialisations of `kernels/proxy_drift.py`."""

from specialisation import Compilation

from tiered.kernels.proxy_attention import WARPS, parts_block
from tiered.kernels.proxy_drift import _drift

_STRIDES = "query_batch query_head query_cluster key_batch key_head key_column updating_batch"
COMPILATIONS = tuple(
    Compilation(
        kernel=_drift,
        types={
            "queries keys": f"*{dtype}",
            "updating": "*u8",
            "index part_of old_columns old_sizes new_columns new_sizes": "*i64",
            "old_scores old_peaks old_masses drift new_scores new_peaks new_masses": "*fp32",
            f"{_STRIDES} group clusters changing keep_first keep_stop parts length head_dim": "i32",
            "scale soft_cap": "fp32",
        },
        constexprs={
            "query_element": 1,
            "key_element": 1,
            "INDEXED": flagged,
            "UPDATING": flagged,
            "CAPPED": capped,
            "UPCAST": False,
            "BLOCK_ROWS": block,
            "BLOCK_KEYS": block,
            "BLOCK_PARTS": parts_block(parts),
            "BLOCK_ELEMENTS": 128,
        },
        num_warps=WARPS,
        # A product in float32 has whole rows of both factors in registers.
        spills=dtype == "fp32",
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
