"""Books: the temporaries of a refresh that captures hidden states, and of an update of them.

The formulas follow `tiered.policies.polestar` tensor by tensor, for an update of all rows: a few clusters may hold them
all. They are of the plain torch operations; the kernels on a GPU take less.
"""

from dataclasses import replace

from tiered.clustering.seeding import SKETCH_WIDTH
from tiered.clustering.tiles import DEVICE_ELEMENTS
from tiered.forward.forward_bytes import part_bytes, part_rows
from tiered.kernels.proxy_attention_ref import SCORES_AT_ONCE
from tiered.offload.codec_bytes import workspace_bytes
from tiered.policies.polestar.cluster_sizes import ClusterSizes

# Tensors of the size of all scores at once where the divergence is measured: the reference, both log-probabilities, and
# what `divergence_terms` makes of them, with its masks.
_COMPARED = 9.25
# The same where columns leave a reference, or join it, and where attention is summed part by part.
_SUMMED = 4
# Of faiss: `distance_compute_blas_query_bs` and `distance_compute_blas_database_bs`.
_FAISS_ROWS, _FAISS_CENTROIDS = 4096, 1024
_FLOAT32, _INT64 = 4, 8


def update_bytes(sizes: ClusterSizes) -> int:
    """The most that an update holds at a time, rows that go from layer to layer and a part's temporaries included."""
    call, shape, batch, clusters = sizes.call, sizes.call.shape, sizes.call.sequences, sizes.clusters
    flow, values = sizes.flow * sizes.row, sizes.kept * sizes.row
    keys = batch * sizes.flow * shape.kv_width
    # Where rows stand: in the canvas, in what is gathered, and whether they count.
    places = _INT64 * batch * (6 * sizes.flow + 2 * call.context)
    scores = _FLOAT32 * batch * shape.heads * clusters * sizes.flow
    members = (_FLOAT32 + 1) * batch * sizes.flow * sizes.parts
    measured = max(
        int(_COMPARED * scores) + keys * call.element,
        _SUMMED * scores + keys * (2 * call.element + _FLOAT32) + members,
    )
    # Rows that the layer below has made are picked out in a copy; those that were chosen stay as they came in until the
    # touched clusters are stored.
    gathered, known = 2 * flow, sizes.renewed * sizes.row
    # The copies in float32 of one sequence, and the sums.
    means = sizes.kept * shape.width * _FLOAT32 * (call.dtype != "float32") + 4 * _centroids(sizes)
    patched = flow + max(known + values + max(flow, means, _coding(sizes)), _moving(sizes))
    part = part_bytes(replace(call, context=sizes.flow))
    normed = min(sizes.flow, part_rows(batch)) * sizes.row  # of the last part whose keys were written
    return flow + places + max(measured + normed, flow + known + part, gathered, patched)


def refresh_bytes(sizes: ClusterSizes) -> int:
    """The most that a refresh holds at a time, rows that go from layer to layer and a part's temporaries included."""
    call, shape, batch, rows = sizes.call, sizes.call.shape, sizes.call.sequences, sizes.kept
    hidden = call.context * sizes.row
    held = batch * sizes.clusters * shape.width * call.element  # centroids of the layer that is clustered
    tile = _FLOAT32 * min(batch * rows * shape.width, max(DEVICE_ELEMENTS, shape.width, sizes.clusters))
    products = _FLOAT32 * min(batch * rows * sizes.clusters, DEVICE_ELEMENTS)
    # At least as many as `tiered.clustering.seeding` draws for each centroid.
    trials = 4 + 2 * sizes.clusters.bit_length()
    sketch = _FLOAT32 * batch * rows * (min(shape.width, SKETCH_WIDTH) + 6 * trials)
    # Indices and sums of each column.
    numbers = (8 * _INT64 + 6 * _FLOAT32) * batch * call.context
    # Sequences of different lengths are clustered in groups, whose rows are copied where they are no slice.
    copied = 2 * hidden if batch > 2 else 0
    clustering = copied + tile + max(products, sketch) + 6 * _centroids(sizes) + numbers
    if sizes.faiss:
        # Of one sequence: its rows, of unit norm in float32, and what is found of each; faiss goes by blocks of rows.
        found = rows * (shape.width * (_FLOAT32 + call.element * (call.dtype != "float32")) + _FLOAT32 + _INT64)
        clustering += found + _FLOAT32 * min(rows, _FAISS_ROWS) * min(sizes.clusters, _FAISS_CENTROIDS)
    # Rows in the order of their clusters, and whether all are finite.
    storing = rows * shape.width * (2 * call.element + 3) + _coding(sizes)
    return hidden + held + max(clustering, storing, _moving(sizes) + numbers, part_bytes(call))


def _moving(sizes: ClusterSizes) -> int:
    """Temporaries of measuring the attention of all centroids over all keys, or of those that have moved."""
    call, shape, batch, clusters = sizes.call, sizes.call.shape, sizes.call.sequences, sizes.clusters
    # A chunk of keys is larger where there are fewer queries, down to those of one centroid.
    rows, shortest = batch * shape.heads, max(16, sizes.parts)
    chunk = min(call.context, max(shortest, SCORES_AT_ONCE // rows))
    keys = batch * shape.kv_width * chunk * (_FLOAT32 + call.element)
    scores = _FLOAT32 * min(max(SCORES_AT_ONCE, rows * clusters * shortest), rows * clusters * call.context)
    members = (_FLOAT32 + 1) * batch * chunk * sizes.parts
    widths = shape.width + shape.heads * shape.head_dim
    queries = batch * clusters * widths * (call.element + 3 * _FLOAT32)
    sums = _FLOAT32 * rows * clusters * (2 * sizes.block + 6 * sizes.parts + 6)
    return keys + _SUMMED * scores + members + queries + 2 * sums


def _coding(sizes: ClusterSizes) -> int:
    """Temporaries of a record on its way into its bytes, or back."""
    return workspace_bytes(sizes.codec, sizes.record_rows, sizes.call.shape.width)


def _centroids(sizes: ClusterSizes) -> int:
    """Bytes of all centroids in float32."""
    return _FLOAT32 * sizes.call.sequences * (sizes.clusters + 1) * sizes.call.shape.width
