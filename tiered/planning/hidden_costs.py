"""Books: what hidden states would take in each codec, beside a policy that keeps none."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiered.core.features import Tier
from tiered.offload.codec_bytes import Codec
from tiered.planning.workload import Workload
from tiered.policies.polestar.options import HiddenOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenCosts:
    """Bytes for a call's context and sequences, as `tiered.policies.polestar.record_costs.TierCosts` counts them.

    Attributes:
        codecs: bytes of the records by codec, in whichever tier keeps them.
        clusters: clusters in each layer of each sequence.
        centroids: bytes on the device of centroids, and of what drift is measured with.
        staging: bytes of the rings on the device that records pass through.
        slots: of these rings.
    """

    codecs: Mapping[Codec, int]
    clusters: int
    centroids: int
    staging: int
    slots: int

    @classmethod
    def of(cls, workload: Workload, options: HiddenOptions) -> "HiddenCosts":
        """The costs if `workload`'s policy kept hidden states as `options` say, in the host tier."""
        costs = workload.hidden_costs(replace(options, tier=Tier.HOST))
        return cls(
            codecs={codec: workload.hidden_costs(replace(options, codec=codec)).records for codec in Codec},
            clusters=costs.clusters,
            centroids=costs.references + costs.banks,
            staging=costs.staging,
            slots=costs.fetch_slots + costs.store_slots,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return {
            "codecs": {codec.value: size for codec, size in self.codecs.items()},
            "clusters": self.clusters,
            "centroids": self.centroids,
            "staging": self.staging,
            "slots": self.slots,
        }
