"""What a call held in each tier, as the ledger booked it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """Bytes of one tier.

    Attributes:
        current: held now.
        peak: held at the most, without idle bytes (`Ledger.idle`).
        at_peak: the same by account.
        required: the least cap under which the same call runs. It is above the peak if a policy keeps hidden states,
            because a call asks for the most that clusters may take.
        cap: of the budget; None for no cap.
    """

    current: int
    peak: int
    at_peak: Mapping[Account, int]
    required: int
    cap: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a call held and moved.

    Attributes:
        tiers: bytes by tier.
        moved: bytes between tiers, as `"device->host"`.
        allocator_peak: bytes that the device's own allocator saw; None where it keeps no such count (CPU).
        disk_path: where the disk tier was; None without one.
    """

    tiers: Mapping[Tier, TierReport]
    moved: Mapping[str, int]
    allocator_peak: int | None = None
    disk_path: str | None = None

    @property
    def peak_device_bytes(self) -> int:
        """Peak of the device tier. As a budget it may be too small: see `budget`."""
        return self.tiers[Tier.DEVICE].peak

    @property
    def peak_host_bytes(self) -> int:
        """Peak of the host tier (pinned memory). As a budget it may be too small: see `budget`."""
        return self.tiers[Tier.HOST].peak

    @property
    def budget(self) -> MemoryBudget:
        """The least budget under which the same call runs in the same way, to pass as `memory`: what device and host
        required (`TierReport.required`), and the disk as it was."""
        return MemoryBudget(
            device=self.tiers[Tier.DEVICE].required,
            host=self.tiers[Tier.HOST].required,
            disk=self.tiers[Tier.DISK].cap,
            disk_path=self.disk_path,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
