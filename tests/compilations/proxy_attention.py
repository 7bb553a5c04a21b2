"""Specialisations of `kernels/proxy_attention.py`."""

from specialisation import Compilation

from tiered.kernels.proxy_attention import MERGED, SPLITS, WARPS, _merge, _partial_sums, attention_block, parts_block

_STRIDES = "query_batch query_head query_cluster key_batch key_head key_column mask_batch mask_column part_batch"
_SIZES = "part_column kv_heads group clusters length head_dim span parts"
COMPILATIONS = (
    *(
        Compilation(
            kernel=_partial_sums,
            types={
                "queries keys": f"*{dtype}",
                "key_mask": "*u8",
                "part": "*i64",
                "peaks masses": "*fp32",
                f"{_STRIDES} {_SIZES}": "i32",
                "scale soft_cap": "fp32",
            },
            constexprs={
                "query_element": 1,
                "key_element": 1,
                "MASKED": parts == 1,
                "PARTED": parts > 1,
                "CAPPED": capped,
                "UPCAST": False,
                "BLOCK_ROWS": attention_block(dtype == "bf16", parts),
                "BLOCK_KEYS": attention_block(dtype == "bf16", parts),
                "BLOCK_PARTS": parts_block(parts),
                "BLOCK_ELEMENTS": 128,
            },
            num_warps=WARPS,
        )
        for dtype, parts, capped in [
            ("bf16", 17, False),
            ("bf16", 9, False),
            ("bf16", 1, False),
            ("bf16", 18, True),
            ("bf16", 1, True),
            ("fp32", 18, True),
            ("fp32", 1, False),
        ]
    ),
    Compilation(
        kernel=_merge,
        types={"peaks masses peak mass": "*fp32", "sums splits parts": "i32"},
        constexprs={"BLOCK": MERGED, "BLOCK_SPLITS": SPLITS},
    ),
)
