"""Books: what a step over rows that have moved takes beside a plain step.

The formulas follow `tiered.policies.dllm_cache` tensor by tensor.
"""

from dataclasses import replace

from tiered.core.buffers import Buffer
from tiered.core.features import Account
from tiered.forward.forward_bytes import part_bytes, part_rows
from tiered.forward.sizes import CallShape

_FLOAT32, _INT64 = 4, 8


def branch_buffers(sizes: CallShape) -> list[Buffer]:
    """Chosen rows of an answer: their ranks, and a copy of those of a part or their angles."""
    answer = sizes.context if sizes.answer is None else sizes.answer
    part = min(answer, part_rows(sizes.sequences)) * sizes.sequences
    # The rows while they go through the MLP, their angles during attention.
    copied = part * max(sizes.shape.width * sizes.element, sizes.shape.head_dim * _FLOAT32 + _INT64)
    chosen = copied + part_bytes(replace(sizes, context=answer))
    # Distances in turn and as they are, the turns, the order, and the sort's own; whether a row counts.
    of_row = 3 * _FLOAT32 + 4 * _INT64 + 1
    return [
        Buffer("distances and order of rows", Account.ACTIVATIONS, (sizes.sequences, answer, of_row)),
        Buffer("chosen rows of a part", Account.ACTIVATIONS, (chosen,), phase="chosen rows"),
    ]
