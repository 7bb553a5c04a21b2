"""Books: the bytes that loading and one call take on the device, by account. Plan and reservation both read them here.

The formulas follow `tiered.forward.forward` tensor by tensor; a test holds them against what torch allocates.
"""

from collections.abc import Mapping
from itertools import product

from tiered.core.features import Account, Feature
from tiered.forward.attention_bytes import AttentionChunk, attention_chunk, attention_rows_bytes
from tiered.forward.sizes import CallShape
from tiered.kernels import block_attention_ref
from tiered.kernels.attention_splits import partial_bytes
from tiered.kernels.row_code import CHUNK_ELEMENTS
from tiered.kernels.weight_product_ref import TILE_ELEMENTS
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape

# Rows of all sequences together that pass a layer at a time. Each weight that is read serves so many rows: an H100
# needs about 300 in bfloat16 before arithmetic, not memory, sets the pace, and a CPU no more than 256. Larger parts
# gain nothing, and their temporaries grow in proportion.
PART_ROWS = 512

_FLOAT32 = 4
_FLOAT64 = 8
_DECODED = 9  # of an element: its code, which looks up a float32 as an int32
_DECODED_WEIGHT = 13  # of one of a weight: the same, and the product with its scales
_TOKEN_ID = 8
_INDEX = 8


def part_rows(batch: int) -> int:
    """Rows of each of `batch` sequences that pass a layer at a time."""
    return max(1, PART_ROWS // batch)


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_width * BYTES_PER_ELEMENT[dtype]


def forward_bytes(
    sizes: CallShape, features: Mapping[Feature, int], logit_rows: int | None = None, most_rows: int | None = None
) -> dict[Account, int]:
    """Bytes that one call reserves on the device beside the weights.

    Args:
        sizes: of the call.
        features: what is kept, as `Policy.features(shape)` gives it: layers for which each feature is kept.
        logit_rows: rows of a sequence whose logits a step gets, at most; None: those of a block.
        most_rows: rows of a sequence that go through a layer in one forward, at most; None: all of them.
    """
    shape, sequences, element = sizes.shape, sizes.sequences, sizes.element
    kept = {
        Account(feature): layers * sequences * sizes.columns(feature) * sizes.row_bytes(feature)
        for feature, layers in features.items()
    }
    logit_rows = sizes.block_length if logit_rows is None else logit_rows
    entries = logit_rows * shape.vocab_size
    # First the normed rows, and the head's output in the model's dtype on its way to float32; later, Gumbel noise of
    # one sequence in float64 with its logits gathered. A sort of some of its rows fits in there, and so do logarithms.
    normed = 2 * sequences * logit_rows * shape.width * _FLOAT32
    rounded = sequences * entries * element if sizes.dtype != "float32" else 0
    noise = entries * (_FLOAT64 + _FLOAT32) if sizes.sampled else 0
    decoded = tile_bytes(sizes, (shape.vocab_size, shape.width), logit_rows) if sizes.weights.head else 0
    logits = sequences * entries * _FLOAT32 + max(normed + rounded + decoded, noise)
    # A part's temporaries are gone when the logits come, so their room serves both; what exceeds the logits is booked
    # with the activations.
    temporaries = part_bytes(sizes, most_rows)
    # Of each column: the token as it was passed, packed, and on the canvas; its committed step and masks; the angles of
    # its position. Its number, in the canvas and in the forward, once for all sequences.
    columns = (4 * _TOKEN_ID + 4 + 3 + shape.head_dim * _FLOAT32) * sequences * sizes.context
    columns += 2 * _INDEX * sizes.context
    if sizes.compared:
        columns += attention_rows_bytes(sizes)
        temporaries = max(temporaries, compared_at_a_time(sizes).temporaries)
    residual = sequences * (most_rows or sizes.context) * shape.width * element
    return {
        **kept,
        Account.LOGITS: logits,
        Account.ACTIVATIONS: residual + columns + max(0, temporaries - logits),
    }


def compared_at_a_time(sizes: CallShape) -> AttentionChunk:
    """What of a block's attention is compared with the step before at a time, in the room of one part of a refresh."""
    return attention_chunk(sizes, rows=_rows_at_once(sizes), room=part_bytes(sizes))


def part_bytes(sizes: CallShape, most_rows: int | None = None) -> int:
    """Temporaries of the part of a forward that passes a layer at a time, at their largest; `most_rows`: as for
    `forward_bytes`."""
    shape, element, rows = sizes.shape, sizes.element, _rows_at_once(sizes, most_rows)
    query_width = shape.heads * shape.head_dim
    # A rotation holds its input in float32 and the dtype, both products of one half, one half done, and the result.
    rotation = rows * query_width * (element + 3 * _FLOAT32)
    # Normed rows, queries, attention's output before and after the heads are joined, the branch.
    attention = rows * element * (2 * shape.width + 3 * query_width)
    # Normed rows; gate, up projection and their product.
    feed_forward = rows * element * (shape.width + (shape.mlp_matrices + 1) * shape.mlp_width)
    # Normed rows, keys and values, and what codes either.
    coded = 0
    if sizes.kv is not None:
        coded = rows * (element * (shape.width + 2 * shape.kv_width) + shape.kv_width * sizes.kv.working)
        coded += rows * sizes.row_bytes(Feature.KEY)
    # Normed rows, queries and what is made of them, and the log-sum-exp of each, while a chunk or parts are there.
    by_block = rows * (element * (shape.width + 2 * query_width) + 2 * _FLOAT32 * shape.heads)
    by_block += _attention_bytes(sizes, rows // sizes.sequences)
    tile = max(tile_bytes(sizes, matrix, rows) for matrix in shape.matrices.values())
    return max(rotation, attention + tile, feed_forward + tile, coded + tile, by_block)


def tile_bytes(sizes: CallShape, matrix: tuple[int, int], rows: int) -> int:
    """Temporaries of `weight_product` with so many rows where there is no kernel: a tile of the matrix on its way from
    its codes to values, or its product."""
    if sizes.weights.code is None or sizes.gpu is not None:
        return 0
    out, inner = matrix
    some = min(out, max(1, TILE_ELEMENTS // inner))
    decoding = min(CHUNK_ELEMENTS, some * inner) * _DECODED_WEIGHT
    return some * inner * sizes.element + max(decoding, some * rows * sizes.element)


def _rows_at_once(sizes: CallShape, most_rows: int | None = None) -> int:
    """Rows of all sequences in the largest part of a forward."""
    return min(most_rows or sizes.context, part_rows(sizes.sequences)) * sizes.sequences


def _attention_bytes(sizes: CallShape, rows: int) -> int:
    """Temporaries of the attention of up to `rows` rows of each sequence. `block_attention` serves the models that no
    library serves, and coded keys; on a GPU it may serve all."""
    shape = sizes.shape
    if shape.soft_cap is None and sizes.kv is None and not shape.block_causal:
        return _merge_bytes(sizes, rows)
    return block_attention_bytes(sizes, rows)


def _merge_bytes(sizes: CallShape, rows: int) -> int:
    """What the kernel of `block_attention` leaves for its merge."""
    if sizes.gpu is None:
        return 0
    shape, element = sizes.shape, sizes.element
    of_heads = shape.heads, shape.kv_heads, rows, sizes.context, shape.head_dim
    return partial_bytes(sizes.sequences, *of_heads, element_bytes=element)


def block_attention_bytes(sizes: CallShape, rows: int) -> int:
    """Temporaries of `block_attention` with up to `rows` rows of each sequence: what the kernel leaves for its merge,
    and a chunk of the reference, which runs where there is no kernel."""
    shape, context, most = sizes.shape, sizes.context, _merge_bytes(sizes, rows)
    sharing, copied = shape.heads // shape.kv_heads, sizes.kv is not None or sizes.dtype != "float32"
    every, pairs_at_once = sizes.sequences * shape.kv_heads, block_attention_ref.PAIRS_AT_ONCE
    most_columns = context if sizes.kv is None else min(context, block_attention_ref.CODED_AT_ONCE)
    for power, fewer in product(range((rows - 1).bit_length() + 1), (False, True) if shape.block_causal else (False,)):
        counted = max(1 << power, -(-shape.head_dim // sharing) if copied else 1)
        columns = most_columns
        if fewer:  # columns, as rows further in front see: then more heads go together
            groups = min(every, max(1, pairs_at_once // (sharing * counted)))
            columns = min(columns, -(-pairs_at_once // (sharing * counted * groups)))
        else:
            groups = min(every, max(1, pairs_at_once // (sharing * counted * columns)))
        if groups > shape.kv_heads:
            groups -= groups % shape.kv_heads
        # Queries, and what comes of keys, in all and of a part, are as large as each other; some sums stand beside.
        some = min(1 << power, rows)
        keys = groups * columns * shape.head_dim if copied else 0
        held = _FLOAT32 * (groups * sharing * some * (columns + 3 * shape.head_dim + 5 + shape.sink_tokens) + keys)
        if sizes.kv is not None:
            # The bytes of these keys, one after the other, and as many as are decoded at once on their way.
            held += groups * columns * sizes.kv.row_bytes(shape.head_dim) + _DECODED * min(CHUNK_ELEMENTS, keys)
        # How many columns each row sees, and which it does not.
        limited = shape.sight != "canvas"
        limits = 2 if shape.windows else int(limited)  # where they end, and where they begin
        hidden = -(-groups // shape.kv_heads) * some * (_INDEX + context) * limits
        most = max(most, held + hidden)
    return most
