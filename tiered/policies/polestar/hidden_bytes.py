"""Books: the rows, clusters and records of hidden states that a call keeps, and their bytes in each tier.

The formulas of temporaries follow `tiered.policies.polestar` tensor by tensor. They count plain torch operations, which
take more than a GPU's kernels, and an update of all rows, because a few clusters may have them all.
"""

from dataclasses import dataclass, replace
from typing import Literal

from tiered.clustering.allocation import MOST_ROWS_PER_CLUSTER, auto_clusters, chosen_clusters
from tiered.clustering.seeding import SKETCH_WIDTH
from tiered.clustering.tiles import DEVICE_ELEMENTS
from tiered.core.buffers import FLOAT32, INT64, Buffer
from tiered.core.features import Account, Tier
from tiered.forward.forward_bytes import block_attention_bytes, part_bytes, part_rows
from tiered.forward.sizes import CallShape
from tiered.kernels.row_code import CHUNK_ELEMENTS
from tiered.offload.codec_bytes import Codec
from tiered.tiers.record_bytes import RecordBytes

RECORD_ROWS = 128  # stored rows of a record: 289 KiB of LLaDA-8B, enough for the link's full speed
CENTROIDS_AT_ONCE = 64  # centroids of each sequence: one tile of the kernel, and scores that stay in a CPU's cache
MOST_SLOTS = 16
# faiss's `distance_compute_blas_query_bs` and `distance_compute_blas_database_bs`.
_FAISS_ROWS, _FAISS_CENTROIDS = 4096, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSizes:
    """The numbers that determine the bytes of hidden states. All counts are upper bounds.

    Attributes:
        call: sizes of the call.
        codec: codec of the records.
        wanted: clusters of a layer and sequence, as in the policy's options.
        top_m: clusters that an update chooses in a layer, as in the policy's options.
        beside: whether clusters updated in the layer below come in addition.
        window: most rows that a refresh clusters; None for no limit.
        appended_blocks: finished blocks that become clusters between two refreshes.
        group: layers that share their clusters.
        faiss: whether faiss iterates k-means.
        of_output: whether drift compares values in addition to keys.
        measures_moves: whether the move of a centroid counts as drift, so that all columns are compared.
    """

    call: CallShape
    codec: Codec
    wanted: int | Literal["auto", "rows"]
    top_m: int | Literal["auto"]
    beside: bool
    window: int | None
    appended_blocks: int
    group: int
    faiss: bool
    of_output: bool
    measures_moves: bool

    @property
    def clustered(self) -> int:
        """Rows of a layer and sequence that a refresh clusters."""
        call = self.call
        # Under a noise mask, only rows behind the block go stale.
        among = call.answer if call.shape.sight == "noise" and call.answer is not None else call.context
        rows = max(0, among - call.block_length)
        return rows if self.window is None else min(rows, self.window)

    @property
    def made(self) -> int:
        """Clusters of a layer and sequence that a refresh makes."""
        rows = self.clustered  # "auto" splits large clusters
        if self.wanted == "rows":
            return rows
        wanted = auto_clusters(rows) + rows // MOST_ROWS_PER_CLUSTER if self.wanted == "auto" else self.wanted
        return min(max(wanted, 2), rows)

    @property
    def chosen(self) -> int:
        """Clusters of a layer and sequence that an update chooses, without those from the layer below."""
        return chosen_clusters(self.top_m, self.clusters, single=self.wanted == "rows")

    @property
    def appended(self) -> int:
        """Clusters of a layer and sequence that are appended after the refresh."""
        return min(self.appended_blocks, max(0, self.call.context // self.call.block_length - 1)) if self.made else 0

    @property
    def clusters(self) -> int:
        return self.made + self.appended

    @property
    def kept(self) -> int:
        """Rows in all clusters of a layer and sequence."""
        return self.clustered + self.appended * self.call.block_length

    @property
    def renewed(self) -> int:
        """Rows of the clusters that an update chooses in a layer and sequence, removed ones included."""
        chosen = self.chosen * (1 + self.layers if self.beside else 1)  # the first layer chooses, but stores no rows
        most = {"auto": MOST_ROWS_PER_CLUSTER, "rows": 1}.get(str(self.wanted), self.clustered)
        larger = min(chosen, self.appended) * max(0, self.call.block_length - most)
        return min(self.kept, chosen * most + larger)

    @property
    def layers(self) -> int:
        """Layers that keep records, one a group. The first and the last layer keep none."""
        return -(-max(0, self.call.shape.layers - 2) // self.group)

    @property
    def records(self) -> int:
        """Records of all layers and sequences."""
        return self.call.sequences * self.layers * -(-self.kept // RECORD_ROWS)

    @property
    def slots(self) -> int:
        """Staging slots of the device for records."""
        # Each cluster of an update may be in two records. Two more are copied for the layer above, or to the host.
        wanted = 2 * self.call.sequences * self.chosen + 2
        return min(MOST_SLOTS, wanted, self.records)

    @property
    def block(self) -> int:  # columns whose keys change at every step, with the predicting row before them
        return self.call.block_length + self.call.shape.prediction_shift

    @property
    def flow(self) -> int:
        """Rows of a sequence that pass the layers in an update."""
        return self.block + self.call.block_length * bool(self.appended) + self.renewed

    @property
    def row(self) -> int:
        """Bytes of one hidden row of every sequence."""
        return self.call.sequences * self.call.shape.width * self.call.element

    def stored(self, rows: int) -> int:
        """Bytes of `rows` hidden rows in their codec."""
        return rows * self.codec.row_bytes(self.call.shape.width, self.call.element)


def hidden_record_bytes(sizes: ClusterSizes, tier: Tier) -> RecordBytes:
    """Bytes of the hidden states that a call stores in `tier`."""
    call, codec = sizes.call, sizes.codec
    return RecordBytes(
        tier=tier,
        codec=codec,
        regions=call.sequences * sizes.layers,
        rows=sizes.kept,
        row_bytes=codec.row_bytes(call.shape.width, call.element),
        clusters=sizes.clusters,
        centroid_bytes=call.shape.width * call.element if codec.needs_base else 0,
        record_rows=min(RECORD_ROWS, max(1, sizes.kept)),
        slots=sizes.slots if tier is Tier.HOST else 0,
    )


def hidden_buffers(sizes: ClusterSizes) -> list[Buffer]:
    """Buffers of `LayerState`, and of temporaries in refreshes and updates."""
    call, shape, clusters, centroids = sizes.call, sizes.call.shape, sizes.clusters, Account.CENTROIDS
    kept = (call.sequences * (sizes.layers + (shape.layers > 1)),)
    block = (1 + sizes.of_output, *kept, sizes.block, shape.kv_width)
    buffers = [
        Buffer("queries of centroids", centroids, (*kept, clusters, shape.heads, shape.head_dim), call.dtype),
        Buffer("peaks and masses of their scores", centroids, (2, *kept, shape.heads, clusters), "float32"),
        Buffer("block's keys and values for drift", centroids, block, call.dtype),
        Buffer("columns of centroids", centroids, (*kept, clusters), "int64"),
    ]
    if sizes.kept:
        stream = call.context * sizes.row  # the residual stream, which a plain step counts
        for phase, needed in (("refresh", refresh_bytes(sizes)), ("update", update_bytes(sizes))):
            rest = (max(0, needed - stream),)
            buffers.append(Buffer("rows, clusters and scores", Account.ACTIVATIONS, rest, phase=phase))
    return buffers


def update_bytes(sizes: ClusterSizes) -> int:
    """Peak bytes of an update, with its rows and the temporaries of a part."""
    call, shape, batch, clusters = sizes.call, sizes.call.shape, sizes.call.sequences, sizes.clusters
    flow, values = sizes.flow * sizes.row, sizes.kept * sizes.row
    # Positions of rows on the canvas and among the gathered rows, and their valid flags.
    places = INT64 * batch * (6 * sizes.flow + 2 * call.context)
    # Earlier and present keys, also in float32, and their scores, with exponentials of half of them. For drift of the
    # output, also values, and copies of them without filler. Log-sum-exps over all columns are computed before.
    compared = 2 * batch * (call.context if sizes.measures_moves else sizes.flow)
    keys = compared * shape.kv_width * call.element * (1 + 2 * sizes.of_output)
    scores = FLOAT32 * shape.heads * clusters * (compared * 3 // 2 + 2 * batch * shape.sink_tokens)
    # Earlier and present outputs of every centroid, and a product of them.
    given = 3 * FLOAT32 * shape.heads_width * batch * clusters if sizes.of_output else 0
    measured = keys + max(compared * shape.kv_width * FLOAT32 + scores + given, _summing(sizes))
    # Rows from below are gathered in a copy. The input of chosen rows stays until affected clusters are stored.
    gathered, known = 2 * flow, sizes.renewed * sizes.row
    # One sequence's rows in float32, and the sums.
    means = sizes.kept * shape.width * FLOAT32 * (call.dtype != "float32") + 4 * _centroids(sizes)
    patched = flow + max(known + values + max(flow, means, _coding(sizes)), _moving(sizes))
    part = part_bytes(replace(call, context=sizes.flow))
    normed = min(sizes.flow, part_rows(batch)) * sizes.row  # normed rows of the last part whose keys were written
    return flow + places + max(measured + normed, flow + known + part, gathered, patched)


def refresh_bytes(sizes: ClusterSizes) -> int:
    """Peak bytes of a refresh, with its rows and the temporaries of a part."""
    call, shape, batch, rows = sizes.call, sizes.call.shape, sizes.call.sequences, sizes.kept
    hidden = call.context * sizes.row
    held = batch * sizes.clusters * shape.width * call.element  # centroids of the layer being clustered
    tile = FLOAT32 * min(batch * rows * shape.width, max(DEVICE_ELEMENTS, shape.width, sizes.clusters))
    products = FLOAT32 * min(batch * rows * sizes.clusters, DEVICE_ELEMENTS)
    # At least the trials of `tiered.clustering.seeding` for each centroid.
    trials = 4 + 2 * sizes.clusters.bit_length()
    sketch = FLOAT32 * batch * rows * (min(shape.width, SKETCH_WIDTH) + 6 * trials)
    numbers = (8 * INT64 + 6 * FLOAT32) * batch * call.context  # indices and sums of each column
    # Sequences of different lengths are clustered in groups. The rows of a group are copied unless it is a slice.
    copied = 2 * hidden if batch > 2 else 0
    clustering = copied + tile + max(products, sketch) + 6 * _centroids(sizes) + numbers
    if sizes.faiss:
        # One sequence's rows, of unit norm in float32, with their results. faiss works by blocks of rows.
        found = rows * (shape.width * (FLOAT32 + call.element * (call.dtype != "float32")) + FLOAT32 + INT64)
        clustering += found + FLOAT32 * min(rows, _FAISS_ROWS) * min(sizes.clusters, _FAISS_CENTROIDS)
    storing = rows * shape.width * call.element + _coding(sizes)  # rows in cluster order
    return hidden + held + max(clustering, storing, _moving(sizes) + numbers, part_bytes(call))


def _summing(sizes: ClusterSizes) -> int:
    """Bytes of temporaries of all centroids' log-sum-exps."""
    call, shape, clusters = sizes.call, sizes.call.shape, sizes.clusters
    sums = 4 * FLOAT32 * call.sequences * shape.heads * clusters  # in parts, and joined
    rows = min(CENTROIDS_AT_ONCE, clusters)
    mixed = call.sequences * rows * shape.heads_width * call.element
    return sums + mixed + block_attention_bytes(call, rows)


def _moving(sizes: ClusterSizes) -> int:
    """Bytes of temporaries of the queries of all centroids, or of the moved ones, and of their reference."""
    call, shape, clusters = sizes.call, sizes.call.shape, sizes.call.sequences * sizes.clusters
    queries = clusters * (shape.width + shape.heads_width) * (call.element + 3 * FLOAT32)
    return queries + _summing(sizes)


def _coding(sizes: ClusterSizes) -> int:
    """Bytes of temporaries when one sequence's rows are encoded. As many rows as half of the slots hold are gathered,
    and encoded a part at a time."""
    rows, width = min(sizes.kept, max(1, sizes.slots // 2) * RECORD_ROWS), sizes.call.shape.width
    part = max(1, min(rows, CHUNK_ELEMENTS // width))
    coded = part * width * sizes.codec.working + sizes.stored(part) * (sizes.codec is not Codec.RAW)
    return rows * width * sizes.call.element + coded


def _centroids(sizes: ClusterSizes) -> int:
    return FLOAT32 * sizes.call.sequences * (sizes.clusters + 1) * sizes.call.shape.width
