"""What a call held in each tier, as the ledger booked it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tiered.features import Account, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """Bytes of one tier: now, at the peak (in all and by account), and the cap (None: uncapped)."""

    current: int
    peak: int
    at_peak: Mapping[Account, int]
    cap: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes by tier, and bytes moved between tiers (`"device->host"`).

    `allocator_peak` is what the device's own allocator saw, in bytes; None where it keeps no such count (CPU).
    """

    tiers: Mapping[Tier, TierReport]
    moved: Mapping[str, int]
    allocator_peak: int | None = field(default=None)

    @property
    def peak_device_bytes(self) -> int:
        """Peak of the device tier."""
        return self.tiers[Tier.DEVICE].peak

    @property
    def peak_host_bytes(self) -> int:
        """Peak of the host tier (pinned memory)."""
        return self.tiers[Tier.HOST].peak

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return asdict(self)
