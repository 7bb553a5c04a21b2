"""Bytes of a call in each tier, from the ledger."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """Bytes of one tier.

    Attributes:
        current: bytes held now.
        peak: most bytes held, without idle bytes (`Ledger.idle`).
        at_peak: bytes at the peak by account.
        required: bytes of the least cap under which the same call runs. It is above the peak if a policy keeps hidden
            states, because a call requires the most that clusters may take.
        cap: bytes of the budget; None for no cap.
    """

    current: int
    peak: int
    at_peak: Mapping[Account, int]
    required: int
    cap: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes that a call held and moved.

    Attributes:
        tiers: bytes by tier.
        moved: bytes moved between tiers, by `"device->host"` and so on.
        allocator_peak: peak bytes of the device's own allocator; None if it has no such count (CPU).
        disk_path: folder of the disk tier; None for no disk tier.
    """

    tiers: Mapping[Tier, TierReport]
    moved: Mapping[str, int]
    allocator_peak: int | None = None
    disk_path: str | None = None

    @property
    def peak_device_bytes(self) -> int:
        """Peak bytes of the device tier. As a budget it may be too small: see `budget`."""
        return self.tiers[Tier.DEVICE].peak

    @property
    def peak_host_bytes(self) -> int:
        """Peak bytes of the host tier (pinned memory). As a budget it may be too small: see `budget`."""
        return self.tiers[Tier.HOST].peak

    @property
    def budget(self) -> MemoryBudget:
        """The least budget, to pass as `memory`, under which the same call runs in the same way. Device and host have
        their `TierReport.required`, the disk its own cap. Raises `ValueError` if the disk's folder is gone."""
        return MemoryBudget(
            device=self.tiers[Tier.DEVICE].required,
            host=self.tiers[Tier.HOST].required,
            disk=self.tiers[Tier.DISK].cap,
            disk_path=self.disk_path,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
