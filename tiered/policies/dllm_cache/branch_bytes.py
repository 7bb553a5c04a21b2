"""Books: the bytes of a step over moved rows beside a plain step.

The formulas follow `tiered.policies.dllm_cache` tensor by tensor.
"""

from dataclasses import replace

from tiered.core.buffers import FLOAT32, INT64, Buffer
from tiered.core.features import Account
from tiered.forward.forward_bytes import part_bytes, part_rows
from tiered.forward.sizes import CallShape


def branch_buffers(sizes: CallShape) -> list[Buffer]:
    """Buffers of an answer's chosen rows: their ranks, and a copy or the angles of a part."""
    answer = sizes.context if sizes.answer is None else sizes.answer
    part = min(answer, part_rows(sizes.sequences)) * sizes.sequences
    # A copy of the rows during the MLP, their angles during attention.
    copied = part * max(sizes.shape.width * sizes.element, sizes.shape.head_dim * FLOAT32 + INT64)
    chosen = copied + part_bytes(replace(sizes, context=answer))
    # Distances in canvas order and in turns, the turns, the order, the sort's scratch space, and the valid flags.
    of_row = 3 * FLOAT32 + 4 * INT64 + 1
    return [
        Buffer("distances and order of rows", Account.ACTIVATIONS, (sizes.sequences, answer, of_row)),
        Buffer("chosen rows of a part", Account.ACTIVATIONS, (chosen,), phase="chosen rows"),
    ]
