"""Books: the bytes that it takes to keep a block's attention in the last layer and to compare it with the next step's.

The comparison goes over some sequences and heads at a time, as many as fit the room that a part of a full refresh takes
anyway. So it adds the kept rows to a call, and temporaries only where a single head exceeds that room.
"""

from dataclasses import dataclass

from tiered.core.buffers import Buffer
from tiered.core.features import Account
from tiered.forward.sizes import CallShape

_FLOAT32 = 4
# Tensors of the size of a chunk that `divergence_terms` holds at its peak, with both log-probabilities and its masks.
_COMPARED = 8
# For each pair of a needed row and one of the step: whether they are the same, as two masks and an integer.
_MATCHED = 8


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """What is compared at a time.

    Attributes:
        sequences: sequences; 1 where not all heads go together.
        heads: query heads of each: a multiple of those that share keys, or a divisor.
        temporaries: bytes of the temporaries, on the device.
    """

    sequences: int
    heads: int
    temporaries: int


def attention_rows(sizes: CallShape) -> list[Buffer]:
    """The rows that are kept, as log-probabilities, and the shift of each."""
    shape, rows = sizes.shape, (sizes.batch, sizes.block_length)
    kept = (sizes.batch, shape.heads, sizes.block_length, sizes.context + shape.sink_tokens)
    return [
        Buffer("attention of the block", Account.ACTIVATIONS, kept, "float32"),
        Buffer("its shift", Account.ACTIVATIONS, (2, *rows), "float32"),
    ]


def attention_chunk(sizes: CallShape, *, rows: int, room: int) -> AttentionChunk:
    """As much as `room` bytes of temporaries allow, and one head of one sequence at the least. `rows` of all sequences
    pass a layer at a time."""
    shape, sequences, context, block_length = sizes.shape, sizes.batch, sizes.context, sizes.block_length
    element = sizes.element
    query_width = shape.heads * shape.head_dim
    # The layer's normed rows and their queries, the block's queries among them, and where its rows stand.
    fixed = rows * (shape.width + query_width) * element + block_length * rows * _MATCHED
    fixed += sequences * block_length * query_width * element
    # By head: scores and what they turn into, and queries in float32. Heads that share keys share those in float32 too.
    by_head = _FLOAT32 * block_length * (_COMPARED * (context + shape.sink_tokens) + shape.head_dim)
    keys = _FLOAT32 * context * shape.head_dim if sizes.dtype != "float32" else 0
    sharing = shape.heads // shape.kv_heads
    free = room - fixed
    groups = max(0, free // (sharing * by_head + keys))
    together = max(1, min(sequences, groups // shape.kv_heads))
    if groups:
        heads = min(groups, shape.kv_heads) * sharing
    else:
        heads = max(n for n in range(1, sharing + 1) if sharing % n == 0 and (n == 1 or n * by_head + keys <= free))
    temporaries = fixed + together * (heads * by_head + max(1, heads // sharing) * keys)
    return AttentionChunk(together, heads, temporaries)
