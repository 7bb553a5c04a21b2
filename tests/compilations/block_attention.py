"""Specialisations of `kernels/attention_programs.py`."""

from specialisation import Compilation

from tiered.kernels.attention_parts import CODES, Form
from tiered.kernels.attention_programs import attend_split, merge_splits
from tiered.kernels.attention_splits import elements, merged_tile, tile_of, turning_elements
from tiered.kernels.launch import VECTOR
from tiered.kernels.row_code import WORD, RowCode


def _compilation(
    dtype: str,
    code: RowCode | None,
    head_dim: int,
    folded: int,
    *,
    capped: bool = False,
    split: bool,
    pairs: int = -1,
    apart: bool = False,
) -> Compilation:
    turning = (-1,) if pairs < 0 else (pairs, turning_elements(pairs, code))
    element_bytes = 4 if dtype == "fp32" else 2
    tile = tile_of(folded, head_dim=head_dim, element_bytes=element_bytes, code=code, made=pairs >= 0)
    of_sinks = "sink_keys sink_values" if code else ""
    of_queries, of_mixed = "query_batch query_head query_row", "mixed_split mixed_batch mixed_head mixed_row"
    of_stores = "key_batch key_head key_column value_batch value_head value_column"
    of_limits = "mask_batch mask_column start_batch start_row stop_batch stop_row table_batch table_column"
    return Compilation(
        kernel=attend_split,
        types={
            "queries sink_keys sink_values key_weight": f"*{dtype}",
            "keys values": "*u8" if code else f"*{dtype}",
            "key_mask": "*u8",
            "starts stops": "*i64",
            "cos sin": "*fp32",
            "mixed": "*fp32" if split else f"*{dtype}",
            "peaks masses": "*fp32",
            f"{of_queries} {of_stores} {of_mixed} {of_limits} kv_heads group rows length span sinks": "i32",
            "scale soft_cap": "fp32",
        }
        | ({"stores": "*i64"} if apart else {}),
        constexprs=({} if apart else {"stores": None})
        | {
            "query_element": 1,
            "key_element": 1,
            "value_element": 1,
            "CAPPED": capped,
            "MASKED": capped,
            "STARTS": not capped and not apart,
            "STOPS": capped or apart,
            "UPCAST": False,
            "ALIGNED": WORD if code else VECTOR,
            "FORM": Form(CODES[code], head_dim, tile.rows, tile.columns, elements(head_dim, code), *turning),
        },
        multiples=f"queries {of_sinks} key_weight cos sin table_column mixed {of_queries} {of_mixed}",
        num_warps=tile.warps,
        num_stages=tile.stages,
        # A product in float32 has whole rows of both factors in registers.
        spills=dtype == "fp32" and (apart or head_dim == 512 or (head_dim == 256 and code is not None)),
        byte_loads=(32 if code else 52) if capped else 0,  # flags of the mask
        copied=(1 if pairs >= 0 else 2) * tile.columns * head_dim // (2 if code is RowCode.NVFP4 else 1) if code else 0,
    )


COMPILATIONS = (
    *(
        _compilation(dtype, code, 128, folded, capped=capped, split=split)
        for dtype, folded, capped, split in (
            ("bf16", 32, True, True),
            ("bf16", 32, False, True),
            ("bf16", 512, False, False),
            ("bf16", 512, True, False),
            ("fp32", 32, True, False),
        )
        for code in CODES
    ),
    *(
        _compilation(dtype, code, head_dim, folded, capped=True, split=False)
        for head_dim in (64, 256, 512)
        for dtype, folded in (("bf16", 32), ("bf16", 512), ("fp32", 32))
        for code in CODES
    ),
    *(
        _compilation(dtype, code, 128, folded, split=split, apart=True)
        for dtype, folded, split in (("bf16", 32, True), ("bf16", 512, False), ("fp32", 32, False))
        for code in CODES
    ),
    *(  # of values, as in layers of DiffusionGemma
        _compilation(dtype, code, 512, folded, capped=False, split=split, pairs=64)
        for dtype, folded, split in (("bf16", 32, True), ("bf16", 2048, False), ("fp32", 2048, False))
        for code in CODES
    ),
    *(
        Compilation(
            kernel=merge_splits,
            types={"totals peaks masses peak mass": "*fp32", "mixed": "*bf16", "sums heads rows splits": "i32"},
            constexprs={"HEAD_DIM": head_dim, "TILE": merged_tile(head_dim)},
        )
        for head_dim in (128, 512)
    ),
)
