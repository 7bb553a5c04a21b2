"""Books: the bytes that loading and one call take on the device, by account. Plan and reservation both read them here.

The formulas follow `tiered.forward.forward` tensor by tensor; a test holds them against what torch allocates.
"""

from collections.abc import Mapping

from tiered.core.features import ANSWER_ONLY, Account, Feature
from tiered.forward.attention_costs import AttentionChunk, attention_chunk, attention_rows_bytes
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape

# Rows of all sequences together that pass a layer at a time. Each weight that is read serves so many rows: an H100
# needs about 300 in bfloat16 before arithmetic, not memory, sets the pace, and a CPU no more than 256. Larger parts
# gain nothing, and their temporaries grow in proportion.
PART_ROWS = 512

# Of `tiered.kernels.capped_attention_ref`: scores that exist at a time, or those of the heads that share one key head.
PAIRS_AT_ONCE = 1 << 20

_FLOAT32 = 4
_FLOAT64 = 8
_TOKEN_ID = 8


def part_rows(batch: int) -> int:
    """Rows of each of `batch` sequences that pass a layer at a time."""
    return max(1, PART_ROWS // batch)


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of all weights in `dtype`."""
    return shape.parameters * BYTES_PER_ELEMENT[dtype]


def feature_bytes(shape: ModelShape, feature: Feature, *, layers: int, rows: int, dtype: str) -> int:
    """Bytes of `feature` for `rows` rows in `layers` layers, raw in `dtype`."""
    elements = shape.kv_width if feature in (Feature.KEY, Feature.VALUE) else shape.width
    return layers * rows * elements * BYTES_PER_ELEMENT[dtype]


def call_bytes(
    shape: ModelShape,
    features: Mapping[Feature, int],
    *,
    batch: int,
    context: int,
    block_length: int,
    dtype: str,
    answer: int | None = None,
    logit_rows: int | None = None,
    sampled: bool = False,
    attention_rows: int = 0,
) -> dict[Account, int]:
    """Bytes that one call reserves on the device beside the weights.

    Args:
        shape: sizes of the model.
        features: what the policy keeps, as `Policy.features(shape)` gives it: layers for which each feature is kept.
        batch: sequences that go through a forward together; with guidance, twice those asked for.
        context: positions of the canvas, prompt and answer together.
        block_length: positions of a block.
        dtype: of weights and activations, a key of `BYTES_PER_ELEMENT`.
        answer: positions behind the prompt; None: any number of them.
        logit_rows: rows of a sequence whose logits a step gets, at most; None: those of a block.
        sampled: whether proposing takes more than the logits: tokens are drawn at a temperature above 0, the
            distribution is cut, or its entropy is the confidence.
        attention_rows: sequences whose last layer's attention is kept, for a commit rule that needs the drift; with
            guidance, half of `batch`.
    """
    columns_of = {feature: answer if answer and feature in ANSWER_ONLY else context for feature in features}
    kept = {
        Account(feature): feature_bytes(shape, feature, layers=layers, rows=batch * columns_of[feature], dtype=dtype)
        for feature, layers in features.items()
    }
    logit_rows = block_length if logit_rows is None else logit_rows
    entries = logit_rows * shape.vocab_size
    # First the normed rows, and the head's output in the model's dtype on its way to float32; later, Gumbel noise of
    # one sequence in float64 with its logits gathered. A sort of some of its rows fits in there, and so do logarithms.
    normed = 2 * batch * logit_rows * shape.width * _FLOAT32
    rounded = batch * entries * BYTES_PER_ELEMENT[dtype] if dtype != "float32" else 0
    noise = entries * (_FLOAT64 + _FLOAT32) if sampled else 0
    logits = batch * entries * _FLOAT32 + max(normed + rounded, noise)
    # A part's temporaries are gone when the logits come, so their room serves both; what exceeds the logits is booked
    # with the activations.
    temporaries = part_bytes(shape, batch=batch, context=context, dtype=dtype)
    columns = _column_bytes(shape) * batch * context
    if attention_rows:
        block = {"block_length": block_length, "context": context}
        columns += attention_rows_bytes(shape, sequences=attention_rows, **block)
        chunk = compared_at_a_time(shape, batch=batch, attention_rows=attention_rows, dtype=dtype, **block)
        temporaries = max(temporaries, chunk.temporaries)
    residual = batch * context * shape.width * BYTES_PER_ELEMENT[dtype]
    return {
        **kept,
        Account.LOGITS: logits,
        Account.ACTIVATIONS: residual + columns + max(0, temporaries - logits),
    }


def compared_at_a_time(
    shape: ModelShape, *, batch: int, attention_rows: int, context: int, block_length: int, dtype: str
) -> AttentionChunk:
    """What of a block's attention is compared with the step before at a time, in the room of one part of a refresh; the
    arguments are those of `call_bytes`."""
    return attention_chunk(
        shape,
        sequences=attention_rows,
        block_length=block_length,
        context=context,
        rows=min(context, part_rows(batch)) * batch,
        dtype=dtype,
        room=part_bytes(shape, batch=batch, context=context, dtype=dtype),
    )


def _column_bytes(shape: ModelShape) -> int:
    """What a call keeps for one column: the token as it was passed, packed, and on the canvas; its committed step and
    masks; the angles of its position."""
    return 4 * _TOKEN_ID + 4 + 3 + shape.head_dim * _FLOAT32


def part_bytes(shape: ModelShape, *, batch: int, context: int, dtype: str) -> int:
    """Temporaries of the part of a full refresh that passes a layer at a time, at their largest."""
    element = BYTES_PER_ELEMENT[dtype]
    rows = min(context, part_rows(batch)) * batch
    query_width = shape.heads * shape.head_dim
    # A rotation holds its input in float32 and the dtype, both products of one half, one half done, and the result.
    rotation = rows * query_width * (element + 3 * _FLOAT32)
    # Normed rows, queries, attention's output before and after the heads are joined, the branch.
    attention = rows * element * (2 * shape.width + 3 * query_width)
    # Normed rows; gate, up projection and their product.
    feed_forward = rows * element * (shape.width + (shape.mlp_matrices + 1) * shape.mlp_width)
    capped = 0
    if shape.soft_cap is not None:
        # Normed rows, queries and what is made of them, while scores of a chunk are there.
        capped = rows * element * (shape.width + 2 * query_width)
        capped += _capped_bytes(shape, batch=batch, rows=rows // batch, context=context, dtype=dtype)
    return max(rotation, attention, feed_forward, capped)


def _capped_bytes(shape: ModelShape, *, batch: int, rows: int, context: int, dtype: str) -> int:
    """Temporaries of a chunk of `tiered.kernels.capped_attention_ref`, of up to `rows` rows of each sequence. (The
    kernel for CUDA takes none.)"""
    sharing, copied = shape.heads // shape.kv_heads, dtype != "float32"
    most = 0
    for power in range((rows - 1).bit_length() + 1):
        counted = max(1 << power, -(-shape.head_dim // sharing) if copied else 1)
        groups = min(batch * shape.kv_heads, max(1, PAIRS_AT_ONCE // (sharing * counted * context)))
        if groups > shape.kv_heads:
            groups -= groups % shape.kv_heads
        # Queries, and what comes of keys and of sinks, are as large as each other; some sums of each stand beside them.
        some = min(1 << power, rows)
        queries = groups * sharing * some * shape.head_dim
        keys = groups * context * shape.head_dim if copied else 0
        held = groups * sharing * some * (context + 4) + queries + max(keys + queries, 3 * queries)
        hidden = -(-groups // shape.kv_heads) * some * context if shape.noise_masked else 0
        most = max(most, _FLOAT32 * held + hidden)
    return most
