"""Books: the bytes of Elastic-Cache beside its features and a plain step.

The window's attention is summed in parts that fit the room of a full refresh. The sums add temporaries only if a single
row of one key head exceeds it.
"""

from dataclasses import dataclass

from tiered.core.buffers import Buffer
from tiered.core.features import Account
from tiered.forward.forward_bytes import part_bytes, part_rows
from tiered.forward.sizes import CallShape

_FLOAT32 = 4
_INDEX = 8
# Bytes of a column: its place among the rows, the row's column twice, the column in the other rows, and four masks.
_BY_COLUMN = 4 * _INDEX + 4
# Attention weights of the tracked tokens in a layer: past, now, and their product.
_COMPARED = 3


@dataclass(frozen=True, slots=True)
class WindowChunk:
    """A part of the sums: numbers of sequences, of key heads, and of rows of the query heads that share a key head."""

    sequences: int
    key_heads: int
    rows: int


def window_chunk(sizes: CallShape, *, window: int, tracked: int) -> WindowChunk:
    """The largest part that fits beside a step over canvases of these `sizes`, at any block length."""
    shape = sizes.shape
    free = part_bytes(sizes) - _observed(sizes, window=window, tracked=tracked)
    row = shape.heads // shape.kv_heads * _weights(sizes)  # of one key head
    most = max(1, free // row)
    rows = min(window, most)
    key_heads = min(shape.kv_heads, most // rows)
    sequences = min(sizes.sequences, most // (rows * key_heads)) if key_heads == shape.kv_heads else 1
    return WindowChunk(sequences, key_heads, rows)


def elastic_buffers(sizes: CallShape, *, window: int, tracked: int) -> list[Buffer]:
    """Buffers of the policy's state and steps."""
    shape, sequences, context, activations = sizes.shape, sizes.sequences, sizes.context, Account.ACTIVATIONS
    window, tracked = min(window, context), min(tracked, context)
    kept = (shape.layers - 1, sequences, tracked)
    candidates = min(window, sizes.block_length)
    of_step = min(context, 2 * candidates + window + (shape.layers - 1) * tracked)
    chunk = window_chunk(sizes, window=window, tracked=tracked)
    rows = shape.heads // shape.kv_heads * chunk.sequences * chunk.key_heads * chunk.rows
    observed = _observed(sizes, window=window, tracked=tracked) + rows * _weights(sizes)
    queries = (*kept, shape.heads, shape.head_dim)
    buffers = [
        Buffer("queries of tracked tokens", activations, queries, sizes.dtype),
        Buffer("columns of tracked tokens", activations, kept, "int64"),
        Buffer("places and masks of columns", activations, (sequences, context + of_step, _BY_COLUMN)),
        Buffer("attention of the window", activations, (observed,), phase="attention of the window"),
    ]
    if sequences > 1:  # the step's rows come before all others, because sequences widen from different numbers of rows
        in_front = (sequences, of_step, shape.width)
        buffers.append(Buffer("rows of the step", activations, in_front, sizes.dtype))
    return buffers


def _observed(sizes: CallShape, *, window: int, tracked: int) -> int:
    """Bytes held while the window's attention is summed: normed rows and queries of a part, of the window and of the
    tracked tokens, and the tracked tokens' weights."""
    shape, sequences, context = sizes.shape, sizes.sequences, sizes.context
    rows = (min(context, part_rows(sequences)) + window + 2 * tracked) * sequences
    weights = _COMPARED * sequences * tracked * shape.heads * _weights(sizes)
    if shape.sight == "noise":  # the columns that each tracked token sees
        weights += sequences * tracked * context + context * _INDEX
    passing = rows * (shape.width + shape.heads * shape.head_dim) * sizes.element
    return passing + weights + 2 * sequences * context * _FLOAT32


def _weights(sizes: CallShape) -> int:
    """Bytes of one row's attention weights in one head, in float32 and in the model's dtype; with sinks, also of its
    query."""
    query = sizes.shape.head_dim * _FLOAT32 if sizes.shape.sink_tokens else 0
    return query + sizes.context * (_FLOAT32 + (0 if sizes.dtype == "float32" else sizes.element))
