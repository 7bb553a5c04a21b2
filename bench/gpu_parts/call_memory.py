"""What a call took, beside what was planned and booked for it: bytes by the ledger, by torch and by the driver."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from step_cost import resident_peak

from tiered.core.features import Account, Tier
from tiered.output import GenerationOutput
from tiered.planning.plan import Plan


class CallMemory:
    """Looks at the device before a call; `figures` and `faults` speak of the call since."""

    def __init__(self, device: torch.device) -> None:
        """Gives back what torch has freed, so that what it holds at the peak is what the call needs."""
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.allocated = torch.cuda.memory_allocated() if device.type == "cuda" else None
        self._outside = self._outside_torch()
        self._resident = _resident_peak(restart=True)

    def figures(self, out: GenerationOutput, plan: Plan) -> dict[str, Any]:
        """Bytes; None where the device keeps no such count, as the CPU does not.

        `libraries_before_bytes`: that torch held before the call beside the weights: what libraries keep, which is a
        part of `libraries_booked_bytes`.
        `plan_difference_share`: what torch held at the peak over what the plan says, less 1.
        """
        booked, peak = out.memory.peak_device_bytes, out.memory.allocator_peak
        planned, at_peak = plan.tiers[Tier.DEVICE].total, out.memory.tiers[Tier.DEVICE].at_peak
        stats = torch.cuda.memory_stats() if self._device.type == "cuda" else {}
        return {
            "planned_device_bytes": planned,
            "planned_host_bytes": plan.tiers[Tier.HOST].total,
            "planned_device_accounts_bytes": _plain(plan.tiers[Tier.DEVICE].accounts),
            "booked_device_bytes": booked,
            "booked_host_bytes": out.memory.peak_host_bytes,
            "booked_device_accounts_bytes": _plain(at_peak),
            "allocator_peak_bytes": peak,
            "libraries_booked_bytes": at_peak.get(Account.LIBRARIES, 0),
            "libraries_before_bytes": self._before(out),
            "plan_difference_share": None if peak is None else (peak - planned) / planned,
            "booked_difference_share": None if peak is None else (peak - booked) / booked,
            "reserved_peak_bytes": stats.get("reserved_bytes.all.peak"),
            "inactive_split_peak_bytes": stats.get("inactive_split_bytes.all.peak"),
            "outside_torch_before_bytes": self._outside,
            "outside_torch_after_bytes": self._outside_torch(),
            "pinned_asked_bytes": None if out.tiers is None else out.tiers.pinned_requested,
            "pinned_bytes": out.tiers.pinned_actual if out.tiers is not None and out.tiers.pinned else None,
            "resident_before_bytes": self._resident,
            "resident_peak_bytes": _resident_peak(),
        }

    def faults(self, out: GenerationOutput, cap: int | None = None) -> Iterator[str]:
        """Where a call held more than its books, or more than `cap`: law 4."""
        peak, booked = out.memory.allocator_peak, out.memory.peak_device_bytes
        for limit, what in ((booked, "that were booked"), (cap, "of the cap")):
            if peak is not None and limit is not None and peak > limit:
                libraries = out.memory.tiers[Tier.DEVICE].at_peak.get(Account.LIBRARIES, 0)
                before = self._before(out)
                known = "" if before is None else f"; {before} were there before the call, {libraries} are libraries'"
                yield f"torch held {peak} bytes, {peak - limit} more than the {limit} {what}{known}"

    def _before(self, out: GenerationOutput) -> int | None:
        """Bytes that torch held before the call beside the weights."""
        weights = out.memory.tiers[Tier.DEVICE].at_peak.get(Account.WEIGHTS, 0)
        return None if self.allocated is None else self.allocated - weights

    def _outside_torch(self) -> int | None:
        """Bytes of the device in use that torch's allocator does not hold: the context, libraries, other processes."""
        if self._device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


def _resident_peak(restart: bool = False) -> int | None:
    """As of `step_cost`; where the system does not let it be restarted, the peak of the process."""
    if restart:
        with suppress(OSError):
            return resident_peak(restart=True)
    return resident_peak()


def _plain(accounts: Any) -> dict[str, int]:
    return {account.value: size for account, size in accounts.items()}
