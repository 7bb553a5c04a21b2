"""What each codec costs and loses on given hidden states, by layer and number of clusters."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.clustering.areas import cluster_areas
from tiered.clustering.cluster_index import ClusterIndex
from tiered.offload.codec_bytes import Codec, centroid_bytes, codec_bytes
from tiered.offload.codecs import CODECS, Nvfp4Codec, RowCodec
from tiered.offload.slabs import UNIT

BF16_BYTES = 2
# Every codec, and the delta against another base, by the name in the table.
VARIANTS: Mapping[str, tuple[Codec, RowCodec]] = {
    **{codec.value: (codec, row_codec) for codec, row_codec in CODECS.items()},
    "nvfp4_delta, mean": (Codec.NVFP4_DELTA, Nvfp4Codec(delta=True, base="mean")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecResult:
    """One codec on one layer.

    Attributes:
        codec: name in `VARIANTS`.
        clusters: C; each is one record.
        layer: whose input rows.
        error: ‖decoded − rows‖ / ‖rows‖ over all elements.
        sqnr_db: −20 log₁₀ of it; None where nothing is lost.
        bytes_per_element: of the records, scales included, without the centroids.
        centroid_bytes_per_element: of the centroids in bfloat16, where the codec needs them.
        ratio_to_bf16: bytes of both over those of the rows in bfloat16.
        encode_ns, decode_ns: per element, median of three on the machine at hand.
    """

    codec: str
    clusters: int
    layer: int
    error: float
    sqnr_db: float | None
    bytes_per_element: float
    centroid_bytes_per_element: float
    ratio_to_bf16: float
    encode_ns: float
    decode_ns: float


@torch.no_grad()
def study_codecs(
    hidden: Float[Tensor, "layers length width"],
    regions: tuple[tuple[int, int], tuple[int, int]],
    clusters: Sequence[int],
    *,
    seed: int = 0,
) -> Iterator[CodecResult]:
    """Every variant on every layer for every number of clusters.

    Args:
        hidden: the layers' input rows of one sequence.
        regions: columns of prefix and suffix; the block between them is not stored.
        clusters: numbers of clusters to try.

    Raises:
        ValueError: see `cluster_areas`.
    """
    for count in clusters:
        indices = cluster_areas(hidden, regions, count, seed=seed)
        for layer, index in enumerate(indices):
            rows = hidden[layer][index.rows]
            for name, (codec, row_codec) in VARIANTS.items():
                yield _measure(name, codec, row_codec, rows, index, count, layer)


def _measure(
    name: str, codec: Codec, row_codec: RowCodec, rows: Tensor, index: ClusterIndex, count: int, layer: int
) -> CodecResult:
    width, elements = rows.shape[1], rows.numel()
    sizes = [codec_bytes(codec, size, width, element_bytes=rows.element_size()) for size in index.sizes]
    # bfloat16 elements where the codec keeps the model's dtype: what a released model would store.
    stored = codec_bytes(codec, len(rows), width, element_bytes=BF16_BYTES, records=index.clusters)
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // UNIT) * UNIT
    buffer, out = torch.empty(end, dtype=torch.uint8, device=rows.device), torch.empty_like(rows)
    delta = codec.needs_base
    centroids, numbers = (index.centroids, list(range(index.clusters))) if delta else (None, None)
    encode = _seconds(lambda: row_codec.encode(rows, index.sizes, buffer, offsets, centroids, numbers))
    decode = _seconds(lambda: row_codec.decode(buffer, offsets, index.sizes, rows.dtype, out, None, centroids))
    error = ((out.double() - rows.double()).norm() / rows.double().norm()).item()
    extra = centroid_bytes(index.clusters, width, element_bytes=BF16_BYTES) if delta else 0
    return CodecResult(
        codec=name,
        clusters=count,
        layer=layer,
        error=error,
        sqnr_db=-20 * math.log10(error) if error else None,
        bytes_per_element=stored / elements,
        centroid_bytes_per_element=extra / elements,
        ratio_to_bf16=(stored + extra) / (BF16_BYTES * elements),
        encode_ns=encode / elements * 1e9,
        decode_ns=decode / elements * 1e9,
    )


def _seconds(work: Callable[[], None], rounds: int = 3) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
