"""Books: bytes for keeping a block's attention in the last layer and comparing it with the next step's.

The comparison goes over a chunk of sequences and heads at a time. The chunk fits the room that a part of a full refresh
takes anyway. So the call grows by the kept rows, and by temporaries only if a single head exceeds that room.
"""

from dataclasses import dataclass

from tiered.core.buffers import FLOAT32, Buffer
from tiered.core.features import Account
from tiered.forward.sizes import CallShape

# Chunk-sized tensors that `divergence_terms` holds at its peak, both log-probabilities and its masks included.
_COMPARED = 8
# For each pair of a needed row and a row of the step: two masks and an integer that say whether they are the same.
_MATCHED = 8


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Sequences and heads that are compared at a time.

    Attributes:
        sequences: sequences of a chunk; 1 if a chunk has only some of the heads.
        heads: query heads of each sequence: a multiple or a divisor of the number that share keys.
        temporaries: bytes of the temporaries, on the device.
    """

    sequences: int
    heads: int
    temporaries: int


def attention_rows(sizes: CallShape) -> list[Buffer]:
    """Log-probabilities of the kept rows, and the shift of each row."""
    shape, rows = sizes.shape, (sizes.batch, sizes.block_length)
    kept = (sizes.batch, shape.heads, sizes.block_length, sizes.context + shape.sink_tokens)
    return [
        Buffer("attention of the block", Account.ACTIVATIONS, kept, "float32"),
        Buffer("its shift", Account.ACTIVATIONS, (2, *rows), "float32"),
    ]


def attention_chunk(sizes: CallShape, *, rows: int, room: int) -> AttentionChunk:
    """The largest chunk whose temporaries fit into `room` bytes, and at least one head of one sequence. `rows` of all
    sequences together pass a layer at a time."""
    shape, sequences, context, block_length = sizes.shape, sizes.batch, sizes.context, sizes.block_length
    element = sizes.element
    # Normed rows of the layer, their queries, the queries of the block, and the matches of its rows.
    fixed = rows * (shape.width + shape.heads_width) * element + block_length * rows * _MATCHED
    fixed += sequences * block_length * shape.heads_width * element
    # By head: scores and the tensors made of them, and float32 queries. Heads that share keys share float32 keys too.
    by_head = FLOAT32 * block_length * (_COMPARED * (context + shape.sink_tokens) + shape.head_dim)
    keys = FLOAT32 * context * shape.head_dim if sizes.dtype != "float32" else 0
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
