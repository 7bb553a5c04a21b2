"""Opening a tier manager, and seeing whether there can be a disk tier."""

from collections.abc import Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any

import torch

from tiered.core.budget import MemoryBudget
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.offload.device import pick_device
from tiered.offload.scratch_file import ScratchFile
from tiered.offload.slabs import UNIT
from tiered.offload.transport import Transport
from tiered.tiers.host_pool import HostPool, told_by_tier
from tiered.tiers.manager import TierManager
from tiered.tiers.record_bytes import StagingSizes


def open_tiers(
    ledger: Ledger,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype = torch.float32,
    transport: Transport | None = None,
    pool: HostPool | None = None,
    expected_bytes: Mapping[Tier, int] = MappingProxyType({}),
    **sizes: Any,
) -> TierManager:
    """A tier manager within `ledger`'s budget. Close it in the end, or use it in a `with`.

    Memory of device and host is obtained as records need it, in whole slabs. The rings on the device are obtained
    here.

    Args:
        ledger: books everything. Its budget caps the tiers.
        device, dtype: device and dtype of the rows.
        transport: what carries copies; None for streams on CUDA, threads on the CPU. It is closed with the manager.
        pool: where host memory comes from and goes back to, of the same ledger; None for one of this manager's own.
        expected_bytes: what all records will take of device and host at most, see `Arena`.
        sizes: fields of `StagingSizes`.

    Raises:
        TierCapacityError: the rings do not fit the budget.
        ValueError: sizes that do not work.
    """
    return TierManager(
        ledger,
        StagingSizes(**sizes),
        device=pick_device(device),
        dtype=dtype,
        transport=transport,
        pool=pool,
        expected_bytes=expected_bytes,
    )


def check_disk(budget: MemoryBudget) -> None:
    """See whether there can be the disk tier that `budget` has, if any: a file is made and closed again.

    Raises:
        OSError: no file can be made in `disk_path`.
        TierCapacityError: the disk has not as many bytes free.
    """
    cap = budget.cap(Tier.DISK)
    if cap and budget.disk_path is not None:
        with told_by_tier(Tier.DISK), closing(ScratchFile(budget.disk_path, UNIT)) as file:
            file.check_free(cap)
