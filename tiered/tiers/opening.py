"""Opening a tier manager: arenas, rings, spill file and transport under one ledger."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.arena import Arena, device_chunks
from tiered.offload.chunk import Chunk
from tiered.offload.device import pick_device
from tiered.offload.fence import Region
from tiered.offload.slabs import UNIT
from tiered.offload.spill_file import SpillFile
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Transport
from tiered.tiers.host_pool import KNOBS, HostPool, booked, open_ring, told_by_tier
from tiered.tiers.manager import TierManager
from tiered.tiers.record_bytes import LOAD_SLOTS, run_bytes
from tiered.tiers.shipping import Rings

Memory = Callable[[int], Chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSizes:
    """Sizes of staging slots and slabs. Raises `ValueError` for sizes that do not work.

    Attributes:
        slot_bytes: bytes of a staging slot that records arrive in, a multiple of 4096; no record may be larger.
        store_bytes: bytes of a staging slot that records leave from, `slot_bytes` at least; None for `slot_bytes`.
        slab_bytes: bytes of what slots in the tiers are cut from, a multiple of 4096 and `slot_bytes` at least; None
            for `slot_bytes`.
        fetch_slots, store_slots, load_slots: staging slots of the rings.
    """

    slot_bytes: int = 4 << 20
    store_bytes: int | None = None
    slab_bytes: int | None = None
    fetch_slots: int = 3  # one is decoded, one has arrived, one is filling
    store_slots: int = 2
    load_slots: int = LOAD_SLOTS

    def __post_init__(self) -> None:
        for name in ("store_bytes", "slab_bytes"):
            if (size := getattr(self, name)) is not None and size < self.slot_bytes:
                raise ValueError(f"{name} = {size} must be slot_bytes = {self.slot_bytes} or more")

    @property
    def slab(self) -> int:
        return self.slab_bytes or self.slot_bytes

    @property
    def store(self) -> int:
        return self.store_bytes or self.slot_bytes

    def rings(self, ledger: Ledger, opened: ExitStack, memory: Memory, pool: HostPool, *, files: bool) -> Rings:
        """The rings, booked until `opened` is closed. `files`: whether there is a disk tier."""
        hint = "lower slot_bytes, store_bytes, fetch_slots or store_slots, or raise the budget"
        ring, on_device = partial(open_ring, ledger, opened), booked(ledger, Tier.DEVICE, memory, hint)
        load = None
        store = ring(Region.STORE_SLOT, self.store_slots, self.store, Tier.DEVICE, on_device)
        fetch = ring(Region.FETCH_SLOT, self.fetch_slots, self.slot_bytes, Tier.DEVICE, on_device)
        if files:
            load = ring(Region.LOAD_SLOT, self.load_slots, self.slot_bytes, Tier.HOST, pool.take)
        return Rings(store, fetch, load)


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
    here. With a disk tier, so is a ring of host memory, and the spill file is made, empty: it grows by `slab_bytes` and
    a page as records need it.

    Args:
        ledger: books everything. Its budget caps the tiers; without a disk budget there is no disk tier.
        device, dtype: device and dtype of the rows.
        transport: what carries copies; None for streams on CUDA, threads on the CPU. It is closed with the manager.
        pool: where host memory comes from and goes back to, of the same ledger; None for one of this manager's own.
        expected_bytes: what all records will take of device and host at most, see `Arena`.
        sizes: fields of `StagingSizes`.

    Raises:
        OSError: no file can be made in `disk_path` any more.
        TierCapacityError: the rings do not fit the budget.
        ValueError: sizes that do not work.
    """
    device, staging = pick_device(device), StagingSizes(**sizes)
    with ExitStack() as opened:
        if pool is None:
            pool = HostPool(ledger, device)
            opened.callback(pool.close)
        memory = device_chunks(device)
        arena = partial(_arena, ledger, opened, staging.slab, expected_bytes)
        arenas = {
            Tier.DEVICE: arena(Region.DEVICE_SLOT, Tier.DEVICE, booked(ledger, Tier.DEVICE, memory)),
            Tier.HOST: arena(Region.HOST_SLOT, Tier.HOST, partial(pool.take, unit=staging.slab)),
        }
        spill = _spill_file(ledger, staging.slab, opened)
        rings = staging.rings(ledger, opened, memory, pool, files=spill is not None)
        run = run_bytes(
            ledger.budget, slot_bytes=staging.slot_bytes, store_bytes=staging.store, slab_bytes=staging.slab
        )
        transport = transport or _transport_for(device)
        opened.callback(transport.close)  # the last to come is the first to go: no copy outlives what it works on
        rings = rings._replace(run_bytes=run)
        return TierManager(
            ledger, arenas, spill, rings, transport, device=device, dtype=dtype, on_close=opened.pop_all().close
        )


def check_disk(budget: MemoryBudget) -> None:
    """See whether there can be the disk tier that `budget` has, if any: a file is made and closed again.

    Raises:
        OSError: no file can be made in `disk_path`.
        TierCapacityError: the disk has not as many bytes free.
    """
    cap = budget.cap(Tier.DISK)
    if cap and budget.disk_path is not None:
        with told_by_tier(Tier.DISK), closing(SpillFile(budget.disk_path, UNIT)) as file:
            file.check_free(cap)


def _transport_for(device: torch.device) -> Transport:
    if device.type != "cuda":
        return ThreadTransport()
    from tiered.offload.cuda_transport import CudaTransport

    return CudaTransport(device)


def _arena(
    ledger: Ledger,
    opened: ExitStack,
    slab_bytes: int,
    expected_bytes: Mapping[Tier, int],
    region: Region,
    tier: Tier,
    allocate: Memory,
) -> Arena:
    cap, expected = ledger.budget.cap(tier), expected_bytes.get(tier, 0)
    arena = Arena(region, slab_bytes, cap, allocate, expected_bytes=expected)
    opened.callback(arena.close)
    return arena


def _spill_file(ledger: Ledger, slab_bytes: int, opened: ExitStack) -> SpillFile | None:
    """The disk tier, if the budget has one; it goes when the manager does."""
    folder = ledger.budget.disk_path
    if not ledger.budget.cap(Tier.DISK) or folder is None:
        return None

    def grow(nbytes: int) -> None:
        ledger.allocate({Account.SPARE: nbytes}, Tier.DISK, hint=KNOBS[Tier.DISK])

    def shrink(nbytes: int) -> None:
        ledger.release({Account.SPARE: nbytes}, Tier.DISK)

    # A slab of the file has room for a record that takes a whole one of the host tier, and its header.
    spill = SpillFile(folder, slab_bytes + UNIT, grow, shrink)
    opened.callback(spill.close)
    return spill
