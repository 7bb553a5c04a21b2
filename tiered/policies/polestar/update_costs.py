"""Books: the temporaries of a pass that captures hidden states, and of one that updates them.

The formulas follow `tiered.policies.polestar` tensor by tensor, for an update of all rows: a few clusters may hold them
all. They are of the plain torch operations; the kernels on a GPU take less.
"""

from dataclasses import dataclass

from tiered.forward.costs import part_bytes, part_rows
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.offload.codec_bytes import Codec
from tiered.policies.polestar.options import MOST_PARTS

# Of `tiered.clustering`, which plans do not import because it imports torch.
TILE_ELEMENTS = 1 << 24
SKETCH_WIDTH = 128
# Scores of a chunk of keys, of `tiered.kernels.proxy_attention_ref`.
SCORES_AT_ONCE = 1 << 19
# Tensors of the size of all scores at once where the divergence is measured: the reference, both log-probabilities, and
# what `divergence_terms` makes of them, with its masks.
_COMPARED = 9.25
# The same where columns leave a reference, or join it, and where attention is summed part by part.
_SUMMED = 4
_FLOAT32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSizes:
    """What the temporaries depend on.

    Attributes:
        shape, batch, context, dtype: of the call.
        codec: of the records, of up to `record_rows` rows.
        scored: layers with clusters.
        clusters: of a layer and sequence, `appended` of them come since the refresh.
        parts: into which a reference cuts the attention, where it does.
        kept: rows in all clusters of a layer and sequence.
        renewed: those of the clusters that an update chooses, at most.
        block: columns whose keys a step changes.
        active: rows that an update computes anyway.
    """

    shape: ModelShape
    batch: int
    context: int
    dtype: str
    codec: Codec
    scored: int
    clusters: int
    appended: int
    parts: int
    kept: int
    renewed: int
    block: int
    active: int
    record_rows: int

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def row(self) -> int:
        """Bytes of one hidden row of every sequence."""
        return self.batch * self.shape.width * self.element

    @property
    def with_parts(self) -> int:
        """Queries where a reference has parts: the clusters of a refresh, few enough, and those that came since."""
        return min(self.clusters, MOST_PARTS + self.appended)

    @property
    def flow(self) -> int:
        """Rows of a sequence that go from layer to layer."""
        return self.active + self.renewed


def update_bytes(sizes: UpdateSizes) -> int:
    """The most that an update holds at a time, rows that go from layer to layer and a part's temporaries included."""
    flow, active = sizes.flow * sizes.row, sizes.active * sizes.row
    values = sizes.kept * sizes.row
    keys = sizes.batch * sizes.flow * sizes.shape.kv_width
    # Where rows stand: in the canvas, in what is gathered, and whether they count.
    places = _INT64 * sizes.batch * (6 * sizes.flow + 2 * sizes.context)
    scores = _FLOAT32 * sizes.batch * sizes.shape.heads * sizes.clusters * sizes.flow
    members = (_FLOAT32 + 1) * sizes.batch * sizes.flow * sizes.parts
    measured = max(
        int(_COMPARED * scores) + keys * sizes.element,
        _SUMMED * scores + keys * (2 * sizes.element + _FLOAT32) + members,
    )
    # Of rows that the layer below has made, those that count are picked out in a copy.
    gathered = active + 2 * flow
    # The copies in float32 of one sequence, and the sums.
    means = sizes.kept * sizes.shape.width * _FLOAT32 * (sizes.dtype != "float32") + 4 * _centroids(sizes)
    patched = active + flow + values + max(flow, means, encoding_bytes(sizes), moving_bytes(sizes))
    part = _part(sizes, rows=sizes.flow)
    normed = min(sizes.flow, part_rows(sizes.batch)) * sizes.row  # of the last part whose keys were written
    return flow + places + max(measured + normed, active + flow + part, gathered, patched)


def refresh_bytes(sizes: UpdateSizes) -> int:
    """The most that a refresh holds at a time, rows that go from layer to layer and a part's temporaries included."""
    shape, batch, rows = sizes.shape, sizes.batch, sizes.kept
    # Of deltas, the centroids are those of the records' banks, but for the first layer, which keeps no records.
    layers = 1 if sizes.codec is Codec.NVFP4_DELTA else sizes.scored
    held = layers * batch * sizes.clusters * shape.width * sizes.element
    tile = _FLOAT32 * min(batch * rows * shape.width, max(TILE_ELEMENTS, shape.width, sizes.clusters))
    products = _FLOAT32 * min(batch * rows * sizes.clusters, TILE_ELEMENTS)
    trials = 4 + 2 * sizes.clusters.bit_length()
    sketch = _FLOAT32 * batch * rows * (min(shape.width, SKETCH_WIDTH) + 6 * trials)
    numbers = (8 * _INT64 + 6 * _FLOAT32) * batch * sizes.context
    # Sequences of different lengths are clustered in groups, whose rows are copied where they are no slice.
    copied = 2 * sizes.context * sizes.row if batch > 2 else 0
    clustering = copied + tile + max(products, sketch) + 6 * _centroids(sizes) + numbers
    # Rows in the order of their clusters, and whether all are finite.
    storing = rows * shape.width * (2 * sizes.element + 3) + encoding_bytes(sizes)
    captured = max(clustering, storing, moving_bytes(sizes) + numbers)
    return sizes.context * sizes.row + held + max(captured, _part(sizes, rows=sizes.context))


def encoding_bytes(sizes: UpdateSizes) -> int:
    """Temporaries of a record on its way into its bytes, or back."""
    elements = sizes.record_rows * sizes.shape.width
    match sizes.codec:
        case Codec.RAW:
            return 0
        case Codec.FP8:
            return elements * (3 * _FLOAT32 + 1)
        case Codec.NVFP4 | Codec.NVFP4_DELTA:
            return elements * (_INT64 + 2 * _FLOAT32 + 2)


def moving_bytes(sizes: UpdateSizes) -> int:
    """Temporaries of measuring the attention of all centroids over all keys, or of those that have moved."""
    shape, batch = sizes.shape, sizes.batch
    # A chunk of keys is larger where there are fewer queries, down to those of one centroid.
    rows = batch * shape.heads
    chunk = min(sizes.context, max(16, sizes.parts, SCORES_AT_ONCE // max(1, rows)))
    keys = batch * shape.kv_width * chunk * (_FLOAT32 + sizes.element)
    scores = _FLOAT32 * max(SCORES_AT_ONCE, rows * sizes.clusters * max(16, sizes.parts))
    scores = min(scores, _FLOAT32 * rows * sizes.clusters * sizes.context)
    members = (_FLOAT32 + 1) * batch * chunk * sizes.parts
    queries = batch * sizes.clusters * (shape.width + shape.heads * shape.head_dim) * (sizes.element + 3 * _FLOAT32)
    sums = _FLOAT32 * rows * sizes.clusters * (2 * sizes.block + 6 * sizes.parts + 6)
    return keys + _SUMMED * scores + members + queries + 2 * sums


def _part(sizes: UpdateSizes, *, rows: int) -> int:
    """Temporaries of the part that passes a layer at a time, of a pass over `rows` rows of each sequence."""
    return part_bytes(sizes.shape, batch=sizes.batch, context=rows, dtype=sizes.dtype)


def _centroids(sizes: UpdateSizes) -> int:
    """Bytes of all centroids in float32."""
    return _FLOAT32 * sizes.batch * (sizes.clusters + 1) * sizes.shape.width
