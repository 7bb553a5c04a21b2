"""Books: device memory of one call. Plan and reservation both read it here.

The formulas follow `tiered.forward.forward` tensor by tensor; a test compares them with torch's allocations.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, product

from tiered.core.buffers import FLOAT32, INT64, Buffer, ShapeAndDtype, phase, phase_bytes
from tiered.core.features import KEY_VALUE, Account, Feature
from tiered.forward.attention_bytes import AttentionChunk, attention_chunk, attention_rows
from tiered.forward.sizes import CallShape, feature_buffers, stored_row
from tiered.kernels import block_attention_ref
from tiered.kernels.attention_splits import partial_bytes
from tiered.kernels.expert_table import scratch_numbers
from tiered.kernels.projection import FEW_ROWS
from tiered.kernels.row_code import CHUNK_ELEMENTS, RowCode
from tiered.kernels.weight_product_ref import DECODED_FROM, TILE_ELEMENTS, decoded_rows, most_sums
from tiered.models.shape import BYTES_PER_ELEMENT, VOCABULARY_TILE, ModelShape, rows_at_once, tokens_at_once

# Rows of all sequences together that pass a layer at a time. They share one read of each weight. In bfloat16 an H100
# needs about 300 rows before arithmetic, not memory, limits it, and a CPU at most 256. Larger parts gain nothing, and
# their temporaries grow in proportion.
PART_ROWS = 512

_DECODED = 9  # bytes by element: its code, an int32 index to look it up, and a float32
_DECODED_WEIGHT = 13  # bytes by element of a weight: the same, and the product with its scales


def part_rows(batch: int) -> int:
    """Rows of each of `batch` sequences that pass a layer at a time."""
    return max(1, PART_ROWS // batch)


def kv_bytes_per_token(shape: ModelShape, dtype: str, kv: RowCode | None = None) -> int:
    """Bytes of one more token's keys and values in all layers; those with a window take none beyond it. `kv`: their
    code; None for raw ones."""
    growing, element = [kind for kind in shape.kinds if kind.window is None], BYTES_PER_ELEMENT[dtype]
    rows = [(len(kind.layers), stored_row(kind.shape, each, kv, element)) for kind in growing for each in KEY_VALUE]
    return sum(layers * heads * elements * element for layers, (heads, elements) in rows)


def forward_buffers(
    sizes: CallShape,
    features: Mapping[Feature, int],
    logit_rows: int | None = None,
    most_rows: int | None = None,
    whole_logits: bool = False,
) -> list[Buffer]:
    """Device memory of one call beside the weights.

    Args:
        sizes: sizes of the call.
        features: number of layers for which each feature is kept, as from `Policy.features(shape)`.
        logit_rows: most rows of a sequence whose logits a step computes; None for those of a block.
        most_rows: most rows of a sequence that go through a layer in one forward; None for all.
        whole_logits: as in `logit_buffers`.
    """
    sequences, context, activations = sizes.sequences, sizes.context, Account.ACTIVATIONS
    residual = (sequences, most_rows or context, sizes.shape.width)
    columns = sequences, context
    buffers = [
        *chain.from_iterable(feature_buffers(sizes, features, most_rows).values()),
        Buffer("residual stream", activations, residual, sizes.dtype),
        Buffer("tokens: passed, packed, chosen, on the canvas", activations, (4, *columns), "int64"),
        Buffer("committed step of each token", activations, columns, "int32"),
        Buffer("masks of tokens", activations, (3, *columns), "bool"),
        *(
            Buffer("rotation of each position", activations, (*columns, head_dim), "float32")
            for head_dim in sizes.shape.head_dims
        ),
        Buffer("numbers of columns", activations, (2, context), "int64"),
        *_soft_buffers(sizes),
        *part_buffers(sizes, most_rows),
        *logit_buffers(sizes, logit_rows or sizes.block_length, whole=whole_logits),
    ]
    if sizes.compared:
        compared = phase("attention compared", {"rows": ((compared_at_a_time(sizes).temporaries,), "uint8")})
        buffers += [*attention_rows(sizes), *compared]
    return buffers


def _soft_buffers(sizes: CallShape) -> list[Buffer]:
    """`DiffusionModel.soft_tokens` of the block, in this step and in the one before."""
    if not sizes.shape.conditioned:
        return []
    rows = (2, sizes.sequences, sizes.block_length, sizes.shape.width)
    return [Buffer("soft tokens of the block", Account.ACTIVATIONS, rows, sizes.dtype)]


def logit_buffers(sizes: CallShape, rows: int, *, whole: bool = False) -> list[Buffer]:
    """Logits of up to `rows` rows of each sequence, and the temporaries of the head and of proposing. `whole`: whether
    logits are never in tiles."""
    if sizes.shape.noise == "random" and not whole:
        return _sum_buffers(sizes, rows)
    vocab, of_rows = sizes.shape.vocab_size, sizes.sequences * rows
    buffers: list[Buffer] = []
    if not whole and sizes.shape.tiles_logits(of_rows):
        buffers += phase("head by tiles", _head(sizes, of_rows, min(vocab, tokens_at_once(of_rows))), Account.LOGITS)
        of_rows, rows = min(of_rows, rows_at_once(vocab)), min(rows, rows_at_once(vocab))
    head = _head(sizes, of_rows, vocab)
    buffers += phase("head", head, Account.LOGITS)
    if sizes.sampled:
        # Of one sequence. A sort of some of its rows fits in there, and so do logarithms.
        noise = {"Gumbel noise": ((rows, vocab), "float64")}
        gathered = {"logits of a sequence": ((rows, vocab), "float32")}
        buffers += phase("proposal", {"logits": head["logits"]} | noise | gathered, Account.LOGITS)
    return buffers


def _head(sizes: CallShape, rows: int, tokens: int) -> dict[str, ShapeAndDtype]:
    """Temporaries of making the logits of `rows` rows and `tokens` tokens, and the logits."""
    width = sizes.shape.width
    head: dict[str, ShapeAndDtype] = {
        "logits": ((rows, tokens), "float32"),
        "normed rows": ((2, rows, width), "float32"),
    }
    if sizes.dtype != "float32":  # before the cast to float32
        head["product"] = (rows, tokens), sizes.dtype
    if sizes.weights.head:
        head["tile of the weights"] = (tile_bytes(sizes, (tokens, width), rows),), "uint8"
    return head


def _sum_buffers(sizes: CallShape, rows: int) -> list[Buffer]:
    """Buffers of the head for a rule that only reads sums of logits (`TiledSums`)."""
    shape, tokens, of_rows = sizes.shape, min(VOCABULARY_TILE, sizes.shape.vocab_size), (sizes.sequences, rows)
    head: dict[str, ShapeAndDtype] = {
        "sums of embeddings, and a tile's": ((2, *of_rows, shape.width), "float32"),
        "normed rows": ((2, *of_rows, shape.width), "float32"),
        "logits": ((*of_rows, tokens), "float32"),
    }
    coded = tile_bytes(sizes, (tokens, shape.width), rows) if sizes.weights.head else 0
    chances, embeddings = ((*of_rows, tokens), "float32"), ((*of_rows, shape.width), sizes.dtype)
    drawn = {"Gumbel noise": ((rows, tokens), "float64"), "logits of a sequence": ((rows, tokens), "float32")}
    rounded = {"product": ((*of_rows, tokens), sizes.dtype)} if sizes.dtype != "float32" else {}
    phases = {
        "head": head | rounded | {"tile of the weights": ((coded,), "uint8")},
        "proposal": head | drawn,
        "mean embedding": head | rounded | {"chances": chances, "weighted": chances, "of a tile": embeddings},
    }
    if sizes.weights.head:
        decoded = min(tokens, max(1, CHUNK_ELEMENTS // shape.width)) * shape.width
        phases["mean embedding"]["embeddings"] = (decoded * (sizes.element + _DECODED_WEIGHT),), "uint8"
    return [buffer for name, own in phases.items() for buffer in phase(name, own, Account.LOGITS)]


def compared_at_a_time(sizes: CallShape) -> AttentionChunk:
    """The chunk of a block's attention that is compared at a time, in the room of one part of a refresh."""
    return attention_chunk(sizes, rows=_rows_at_once(sizes), room=part_bytes(sizes))


def part_bytes(sizes: CallShape) -> int:
    """Peak temporaries of the part of a forward that passes a layer at a time."""
    return phase_bytes(part_buffers(sizes), Account.ACTIVATIONS)


def part_buffers(sizes: CallShape, most_rows: int | None = None) -> list[Buffer]:
    """The part's temporaries by phase, of the layers that take most; `most_rows` as in `forward_buffers`. Products of
    one phase are freed before the next begins."""
    kinds = (_part_buffers(replace(sizes, shape=kind.shape), most_rows) for kind in sizes.shape.kinds)
    return max(kinds, key=lambda buffers: phase_bytes(buffers, Account.ACTIVATIONS))


def _part_buffers(sizes: CallShape, most_rows: int | None) -> list[Buffer]:
    shape, rows, dtype = sizes.shape, _rows_at_once(sizes, most_rows), sizes.dtype
    tile = max(tile_bytes(sizes, factor, rows) for factor in shape.factors)
    of_weights = {"tile of the weights": ((tile,), "uint8")}
    products = {"products, half and result": ((3, rows, shape.heads_width), "float32")}
    # Before and after the heads are concatenated.
    mixed = {"queries and what they mix": ((3, rows, shape.heads_width), dtype)}
    gates = {"gate, projections and their product": ((shape.mlp_matrices + 1, rows, shape.mlp_width), dtype)}
    normed, branch = {"normed rows": ((rows, shape.width), dtype)}, {"branch": ((rows, shape.width), dtype)}
    by_block = {
        "queries and what is made of them": ((2, rows, shape.heads_width), dtype),
        "log-sum-exps": ((2, rows, shape.heads), "float32"),
        "chunk": ((_attention_bytes(sizes, rows // sizes.sequences),), "uint8"),
    }
    buffers = [
        *phase("rotation", {"queries": ((rows, shape.heads_width), dtype)} | products),
        *phase("attention", normed | mixed | branch | of_weights),
        *(phase("MLP", normed | gates | of_weights) if shape.experts is None or shape.experts.dense else ()),
        *phase("attention by chunks", normed | by_block),
        *_expert_buffers(sizes, rows, normed | of_weights),
    ]
    codes: dict[str, ShapeAndDtype] = {}
    if sizes.kv is not None:
        codes = {
            "codes on their way": ((rows, shape.kv_width * sizes.kv.working), "uint8"),
            "codes": ((rows, sizes.row_bytes(Feature.VALUE)), "uint8"),
        }
        coded = {"keys and values": ((rows, shape.kept_width), dtype)} | codes
        buffers += phase("codes of keys and values", normed | coded | of_weights)
    if sizes.gpu is not None:  # `DiffusionModel.queries_keys_values`
        made = 2 if any(name.endswith(".q_norm.weight") for name in shape.own_shapes) else 1
        joined = {
            "queries, keys and values": ((rows, shape.heads_width + 2 * shape.kv_width), dtype),
            "queries and keys, normed and rotated": ((made, rows, shape.heads_width + shape.kv_width), dtype),
        }
        buffers += phase("one product of queries, keys and values", normed | joined | codes)
    return buffers


def _expert_buffers(sizes: CallShape, rows: int, beside: Mapping[str, ShapeAndDtype]) -> list[Buffer]:
    """Temporaries of a mixture of experts over `rows` rows: of the router, of the routed experts and of the shared one.
    The kernel takes many routed experts at once, the reference one at a time."""
    shape, experts, dtype = sizes.shape, sizes.shape.experts, sizes.dtype
    if experts is None:
        return []
    some = max(min(rows, FEW_ROWS[-1]), FEW_ROWS[0])
    scores: dict[str, ShapeAndDtype] = {
        "scores, and what the choice is by": ((2, rows, experts.count), "float32"),
        "chosen experts, unsorted": ((2, rows, experts.picked), "int64"),
    }
    picks = {"experts of rows": ((rows, experts.picked), "int64"), "weights": ((rows, experts.picked), "float32")}
    pairs = rows * experts.picked
    outputs = picks | {"outputs of experts": ((pairs, shape.width), dtype)}
    summed: dict[str, ShapeAndDtype] = {"sum of outputs": ((rows, shape.width), dtype)}
    if sizes.gpu is not None:
        most = min(pairs, experts.count)
        routed: dict[str, ShapeAndDtype] = {
            "order of pairs, and tiles": ((sum(scratch_numbers(pairs, most)),), "int32"),
            "addresses of experts": ((3, most), "int64"),
            "gates": ((pairs, experts.width), dtype),
        }
    else:
        routed = {
            "order of experts": ((3, pairs), "int64"),
            "an expert's rows and outputs": ((2, some, shape.width), dtype),
            "its gate, projections and their product": ((3, some, experts.width), dtype),
        }
        summed["sum and an output"] = (2, rows, shape.width), "float32"
        if dtype != "float32":
            routed["outputs, or a gate"] = (some, max(shape.width, experts.width)), "float32"
    if dtype != "float32":
        scores["rows of a router"] = (some, shape.width), "float32"
    shared = {
        "sum of outputs": ((rows, shape.width), dtype),
        "gate, projections and their product": ((3, rows, experts.shared_width), dtype),
    }
    phases = {
        "router": picks | scores,
        "experts": outputs | routed,
        "sum of experts": outputs | summed,
        "shared expert": picks | shared,
    }
    return [buffer for name, own in phases.items() for buffer in phase(name, {**beside, **own})]


def tile_bytes(sizes: CallShape, matrix: tuple[int, int], rows: int) -> int:
    """Temporaries of `weight_product` over `rows` rows. Without a kernel: a decoded tile of the matrix, and either the
    temporaries of decoding it or its product. On a GPU, of up to three matrices that adjoin: a decoded part, or sums of
    some columns."""
    out, inner = matrix
    if sizes.weights.code is None:
        return 0
    if sizes.gpu is not None:
        decoded = decoded_rows(3 * out, inner) * inner * sizes.element if rows >= DECODED_FROM else 0
        return max(decoded, FLOAT32 * most_sums(min(rows, DECODED_FROM - 1), 3 * out, inner))
    some = min(out, max(1, TILE_ELEMENTS // inner))
    decoding = min(CHUNK_ELEMENTS, some * inner) * _DECODED_WEIGHT
    return some * inner * sizes.element + max(decoding, some * rows * sizes.element)


def _rows_at_once(sizes: CallShape, most_rows: int | None = None) -> int:
    """Rows of all sequences in the largest part of a forward."""
    return min(most_rows or sizes.context, part_rows(sizes.sequences)) * sizes.sequences


def _attention_bytes(sizes: CallShape, rows: int) -> int:
    """Temporaries of the attention of up to `rows` rows of each sequence. `block_attention` serves coded keys and the
    models that no library serves; on a GPU it may serve all."""
    shape = sizes.shape
    if shape.soft_cap is None and sizes.kv is None and not shape.block_causal:
        return _merge_bytes(sizes, rows)
    return block_attention_bytes(sizes, rows)


def _merge_bytes(sizes: CallShape, rows: int) -> int:
    """Partial results that the kernel of `block_attention` merges."""
    if sizes.gpu is None:
        return 0
    shape, element = sizes.shape, sizes.element
    of_heads = shape.heads, shape.kv_heads, rows, sizes.context, shape.head_dim
    return partial_bytes(sizes.sequences, *of_heads, element_bytes=element)


def block_attention_bytes(sizes: CallShape, rows: int) -> int:
    """Temporaries of `block_attention` with up to `rows` rows of each sequence: the partial results of the kernel, or
    a chunk of the reference, which runs without a kernel."""
    shape, context, most = sizes.shape, sizes.context, _merge_bytes(sizes, rows)
    sharing, parted = shape.heads // shape.kv_heads, sizes.kv is not None or shape.keys_of_values
    copied = parted or sizes.dtype != "float32"
    every, pairs_at_once = sizes.sequences * shape.kv_heads, block_attention_ref.PAIRS_AT_ONCE
    most_columns = min(context, block_attention_ref.CODED_AT_ONCE) if parted else context
    for power, fewer in product(range((rows - 1).bit_length() + 1), (False, True) if shape.block_causal else (False,)):
        counted = max(1 << power, -(-shape.head_dim // sharing) if copied else 1)
        columns = most_columns
        if fewer:  # rows further in front see fewer columns, so more heads go together
            groups = min(every, max(1, pairs_at_once // (sharing * counted)))
            columns = min(columns, -(-pairs_at_once // (sharing * counted * groups)))
        else:
            groups = min(every, max(1, pairs_at_once // (sharing * counted * columns)))
        if groups > shape.kv_heads:
            groups -= groups % shape.kv_heads
        # Queries, the output and one chunk's output are equally large; some sums come with them.
        some = min(1 << power, rows)
        keys = groups * columns * shape.head_dim if copied else 0
        held = FLOAT32 * (groups * sharing * some * (columns + 3 * shape.head_dim + 5 + shape.sink_tokens) + keys)
        turned = FLOAT32 * keys if shape.keys_of_values else 0  # once values are decoded
        if sizes.kv is None:
            held += turned
        else:
            # Bytes of these keys, contiguous, and the elements that are decoded at once.
            held += groups * columns * sizes.kv.row_bytes(shape.head_dim)
            held += max(turned, _DECODED * min(CHUNK_ELEMENTS, keys))
        # Columns that each row sees, and their mask.
        limited = shape.sight != "canvas"
        limits = 2 if shape.windows else int(limited)  # their end and, with windows, their start
        hidden = -(-groups // shape.kv_heads) * some * (INT64 + context) * limits
        most = max(most, held + hidden)
    return most
