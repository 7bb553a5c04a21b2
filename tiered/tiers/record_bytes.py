"""Books: bytes by tier of the rows of hidden states that a call stores."""

from dataclasses import dataclass
from typing import NamedTuple

from tiered.core.buffers import Buffer
from tiered.core.features import Account, Tier
from tiered.offload.codec_bytes import Codec
from tiered.offload.size_class import size_class


class StoredCluster(NamedTuple):
    """A cluster of a layer: its region, its number there, and its rows of the region."""

    region: int
    cluster: int
    rows: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBytes:
    """Bytes of the hidden states that a policy stores. The clusters are known only after clustering, so every number is
    an upper bound.

    Attributes:
        tier: tier of the rows, device or host.
        codec: codec of the rows.
        regions: layers with stored rows, times sequences.
        rows: rows of a region.
        row_bytes: bytes of a row in its codec.
        clusters: clusters of a region.
        centroid_bytes: bytes of the centroid that a row is stored against; 0 for a codec without.
        record_rows: rows of a record, and of a device slot.
        slots: device slots that records pass through; 0 for rows that stay on the device.
    """

    tier: Tier
    codec: Codec
    regions: int
    rows: int
    row_bytes: int
    clusters: int
    centroid_bytes: int
    record_rows: int
    slots: int

    @property
    def region_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def room(self) -> int:
        """Host bytes for one region, rounded up so that calls of similar sizes reuse the same pieces."""
        return size_class(self.region_bytes)

    @property
    def records(self) -> int:
        """Bytes of all regions."""
        return self.regions * self.region_bytes

    @property
    def slot_bytes(self) -> int:
        return self.record_rows * self.row_bytes

    @property
    def staging(self) -> int:
        """Bytes of the slots."""
        return self.slots * self.slot_bytes

    @property
    def buffers(self) -> list[Buffer]:
        """The rows' memory on the device."""
        rows = self.regions if self.tier is Tier.DEVICE else 0
        against = (self.regions, self.clusters, self.centroid_bytes)
        return [
            Buffer("centroids that rows are stored against", Account.CENTROIDS, against),
            Buffer("slots of stored rows", Account.STAGING, (self.slots, self.record_rows, self.row_bytes)),
            Buffer("stored rows", Account.HIDDEN, (rows, self.rows, self.row_bytes)),
        ]

    @property
    def host(self) -> dict[Account, int]:
        """Bytes of the host by account."""
        if self.tier is Tier.DEVICE:
            return {}
        return {Account.HIDDEN: self.records, Account.SPARE: self.regions * (self.room - self.region_bytes)}
