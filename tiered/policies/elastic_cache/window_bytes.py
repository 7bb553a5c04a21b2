"""Books: the bytes of Elastic-Cache beside its features and a plain step.

The window's attention is summed by parts (`attention_received`).
"""

from tiered.core.buffers import FLOAT32, INT64, Buffer
from tiered.core.features import Account
from tiered.forward.attention_received import SummedChunk, summed_chunk, weights_bytes
from tiered.forward.forward_bytes import part_rows
from tiered.forward.sizes import CallShape

# Bytes of a column: its place among the rows, the row's column twice, the column in the other rows, and four masks.
_BY_COLUMN = 4 * INT64 + 4
# Attention weights of the tracked tokens in a layer: past, now, and their product.
_COMPARED = 3


def window_chunk(sizes: CallShape, *, window: int, tracked: int) -> SummedChunk:
    """The part of the window's attention that is summed at a time, beside a step over canvases of these `sizes`, at any
    block length."""
    return summed_chunk(sizes, rows=window, held=_observed(sizes, window=window, tracked=tracked))


def elastic_buffers(sizes: CallShape, *, window: int, tracked: int) -> list[Buffer]:
    """Buffers of the policy's state and steps."""
    shape, sequences, context, activations = sizes.shape, sizes.sequences, sizes.context, Account.ACTIVATIONS
    window, tracked = min(window, context), min(tracked, context)
    kept = (shape.layers - 1, sequences, tracked)
    candidates = min(window, sizes.block_length)
    of_step = min(context, 2 * candidates + window + (shape.layers - 1) * tracked)
    chunk = window_chunk(sizes, window=window, tracked=tracked)
    observed = _observed(sizes, window=window, tracked=tracked) + chunk.nbytes(sizes)
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
    weights = _COMPARED * sequences * tracked * shape.heads * weights_bytes(sizes)
    if shape.sight == "noise":  # the columns that each tracked token sees
        weights += sequences * tracked * context + context * INT64
    passing = rows * (shape.width + shape.heads_width) * sizes.element
    return passing + weights + 2 * sequences * context * FLOAT32
