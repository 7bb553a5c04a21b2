"""Books: what the hidden states of a whole context would take in each codec, if a policy kept them in a tier."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered.clustering.allocation import auto_clusters
from tiered.models.shape import BYTES_PER_ELEMENT
from tiered.offload.codec_bytes import Codec, centroid_bytes, codec_bytes
from tiered.planning.workload import Workload

# Clusters that an update fetches in a layer: Polestar's M in its authors' presets.
TOP_M = 4
# One slot is read while the next one fills.
RING_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenCosts:
    """Bytes for every row of every sequence in every layer, with clusters of equal size.

    Attributes:
        codecs: bytes of the rows by codec, in whichever tier keeps them.
        clusters: clusters in each layer of each sequence, as `clusters="auto"` chooses them.
        centroids: bytes of all centroids on the device.
        staging: bytes of the ring on the device that fetched records of `nvfp4_delta` arrive in.
    """

    codecs: Mapping[Codec, int]
    clusters: int
    centroids: int
    staging: int

    @classmethod
    def of(cls, workload: Workload) -> "HiddenCosts":
        """The costs for `workload`'s context and sequences, whatever its policy keeps."""
        shape, rows = workload.shape, workload.context
        element_bytes = BYTES_PER_ELEMENT[workload.dtype]
        clusters = auto_clusters(rows)
        fetched = min(TOP_M, clusters)
        rows_per_cluster = -(-rows // clusters)
        slot = codec_bytes(
            Codec.NVFP4_DELTA, fetched * rows_per_cluster, shape.width, element_bytes=element_bytes, records=fetched
        )
        copies = shape.layers * workload.sequences
        return cls(
            codecs={
                codec: copies * codec_bytes(codec, rows, shape.width, element_bytes=element_bytes, records=clusters)
                for codec in Codec
            },
            clusters=clusters,
            centroids=copies * centroid_bytes(clusters, shape.width, element_bytes=element_bytes),
            staging=RING_SLOTS * workload.sequences * slot,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return {
            "codecs": {codec.value: size for codec, size in self.codecs.items()},
            "clusters": self.clusters,
            "centroids": self.centroids,
            "staging": self.staging,
            "top_m": TOP_M,
            "ring_slots": RING_SLOTS,
        }
