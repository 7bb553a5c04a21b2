"""Books: what a pass over rows that have moved takes beside a plain pass.

The formulas follow `tiered.policies.dllm_cache` tensor by tensor.
"""

from tiered.forward.costs import part_bytes, part_rows
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape

_FLOAT32, _INT64 = 4, 8


def branch_pass_bytes(shape: ModelShape, *, batch: int, context: int, answer: int, dtype: str) -> int:
    """Bytes on the device, at their largest, of chosen rows of an answer of `answer` positions: their ranks, and a copy
    of those of a part with their angles. A part of them may be smaller than a part of a plain pass, whose room it has.
    The arguments are those of `call_bytes`."""
    sizes = {"shape": shape, "batch": batch, "dtype": dtype}
    part = min(answer, part_rows(batch)) * batch
    copied = part * (shape.width * BYTES_PER_ELEMENT[dtype] + shape.head_dim * _FLOAT32 + _INT64)
    spare = part_bytes(**sizes, context=context) - part_bytes(**sizes, context=answer)
    # Distances turned to the block and as they are, the order, and the sort's own; whether a row counts.
    ranks = batch * answer * (3 * _FLOAT32 + 3 * _INT64 + 1)
    return max(0, copied - spare) + ranks
