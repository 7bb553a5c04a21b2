"""Clusters of rows as `StoredRows` takes them: in host memory, one region for each layer."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from tiered.core.features import Tier
from tiered.offload.codec_bytes import Codec
from tiered.policies.polestar.hidden_bytes import MOST_SLOTS, RECORD_ROWS
from tiered.tiers.record_bytes import RecordBytes
from tiered.tiers.stored_rows import StoredCluster


def clusters_of(sizes: Sequence[int]) -> list[StoredCluster]:
    """Clusters of `sizes` rows, one behind the other."""
    ends = zip(sizes, accumulate(sizes), strict=True)
    return [StoredCluster(0, number, slice(end - size, end)) for number, (size, end) in enumerate(ends)]


def host_bytes(
    rows: Tensor,
    clusters: int,
    codec: Codec,
    *,
    layers: int = 1,
    record_rows: int = RECORD_ROWS,
    slots: int = MOST_SLOTS,
) -> RecordBytes:
    """Bytes in host memory of `layers` layers, each with as many rows as `rows` [rows, width]."""
    width, element = rows.shape[1], rows.element_size()
    return RecordBytes(
        tier=Tier.HOST,
        codec=codec,
        regions=layers,
        rows=len(rows),
        row_bytes=codec.row_bytes(width, element),
        clusters=clusters,
        centroid_bytes=width * element if codec.needs_base else 0,
        record_rows=record_rows,
        slots=slots,
    )
