"""Books: the bytes that Elastic-Cache takes beside its features and a plain pass, and how much of the attention of its
window is summed up at a time.

The sums go over a part of the window that fits the room which a part of a full refresh takes anyway, so they add
temporaries only where a single row of one key head exceeds that room.
"""

from dataclasses import dataclass

from tiered.forward.costs import part_bytes, part_rows
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape

_FLOAT32 = 4
_INDEX = 8
# For each column: its place among the rows, the row's column twice over (as planned and for the pass), the columns
# beside the step's own, and four masks.
_BY_COLUMN = 4 * _INDEX + 4
# Of the tracked tokens, attention weights of a layer: past, now, and their product.
_COMPARED = 3


@dataclass(frozen=True, slots=True)
class WindowChunk:
    """What is summed up at a time: key heads of sequences, and rows of the query heads that share them."""

    sequences: int
    key_heads: int
    rows: int


def window_chunk(shape: ModelShape, *, batch: int, window: int, tracked: int, context: int, dtype: str) -> WindowChunk:
    """As much as fits beside a pass of `batch` sequences over a canvas of `context` columns."""
    free = part_bytes(shape, batch=batch, context=context, dtype=dtype) - _observed(
        shape, batch=batch, window=window, tracked=tracked, context=context, dtype=dtype
    )
    sharing = shape.heads // shape.kv_heads
    row = sharing * _weights(shape, context, dtype)  # of one key head
    most = max(1, free // row)
    rows = min(window, most)
    key_heads = min(shape.kv_heads, most // rows)
    sequences = min(batch, most // (rows * key_heads)) if key_heads == shape.kv_heads else 1
    return WindowChunk(sequences, key_heads, rows)


def elastic_bytes(
    shape: ModelShape, *, window: int, tracked: int, batch: int, context: int, block_length: int, dtype: str
) -> int:
    """Bytes that state and passes hold at most; sizes as in `tiered.forward.costs.call_bytes`."""
    element = BYTES_PER_ELEMENT[dtype]
    window, tracked = min(window, context), min(tracked, context)
    kept = (shape.layers - 1) * batch * tracked * (shape.heads * shape.head_dim * element + _INDEX)
    # Sequences of a batch may widen from different numbers of rows: the rows of the step stand in front of all others.
    candidates = min(window, block_length)
    of_step = min(context, 2 * candidates + window + (shape.layers - 1) * tracked)
    ragged = of_step * shape.width * element * batch if batch > 1 else 0
    sizes = {"batch": batch, "window": window, "tracked": tracked, "context": context, "dtype": dtype}
    chunk = window_chunk(shape, **sizes)
    rows = shape.heads // shape.kv_heads * chunk.sequences * chunk.key_heads * chunk.rows
    observing = _observed(shape, **sizes) + rows * _weights(shape, context, dtype)
    room = part_bytes(shape, batch=batch, context=context, dtype=dtype)
    return kept + ragged + batch * (context + of_step) * _BY_COLUMN + max(0, observing - room)


def _observed(shape: ModelShape, *, batch: int, window: int, tracked: int, context: int, dtype: str) -> int:
    """What is held while the window's attention is summed up: normed rows and queries of a part, those of the window
    and of the tracked tokens once more, and the tracked tokens' weights."""
    element, query_width = BYTES_PER_ELEMENT[dtype], shape.heads * shape.head_dim
    rows = min(context, part_rows(batch)) * batch + (window + 2 * tracked) * batch
    weights = _COMPARED * batch * tracked * shape.heads * _weights(shape, context, dtype)
    if shape.noise_masked:  # which columns each of them sees
        weights += batch * tracked * context + context * _INDEX
    return rows * (shape.width + query_width) * element + weights + 2 * batch * context * _FLOAT32


def _weights(shape: ModelShape, context: int, dtype: str) -> int:
    """Attention weights of one row and head: in float32, and in the model's dtype on the way. Where there are sinks,
    its query in float32 as well."""
    query = shape.head_dim * _FLOAT32 if shape.sink_tokens else 0
    return query + context * (_FLOAT32 + (0 if dtype == "float32" else BYTES_PER_ELEMENT[dtype]))
