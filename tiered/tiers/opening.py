"""Opening a tier manager: arenas, rings, spill file and transport under one ledger."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

import torch

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.arena import Arena, device_chunks
from tiered.offload.chunk import Chunk
from tiered.offload.device import pick_device
from tiered.offload.errors import ArenaFullError, PinError
from tiered.offload.fence import Region
from tiered.offload.pinning import pick_pinner
from tiered.offload.record_file import RecordFile
from tiered.offload.ring import Ring
from tiered.offload.slabs import UNIT
from tiered.offload.spill_file import SpillFile
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Transport
from tiered.tiers.manager import TierManager
from tiered.tiers.record_bytes import LOAD_SLOTS
from tiered.tiers.shipping import Rings
from tiered.tiers.slots import KNOBS, told_by_tier
from tiered.tiers.traffic import Traffic

SLOT_BYTES = 4 << 20
FETCH_SLOTS = 3  # one is decoded, one has arrived, one is filling
STORE_SLOTS = 2
PINNED_SLABS = 16  # obtained at a time


def open_tiers(
    ledger: Ledger,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype = torch.float32,
    transport: Transport | None = None,
    slot_bytes: int = SLOT_BYTES,
    fetch_slots: int = FETCH_SLOTS,
    store_slots: int = STORE_SLOTS,
    load_slots: int = LOAD_SLOTS,
    pinner: str = "auto",
    traffic: type[Traffic] = Traffic,
) -> TierManager:
    """A tier manager within `ledger`'s budget. Close it in the end, or use it in a `with`.

    Memory of device and host is obtained as records need it, `slot_bytes` at a time and pinned memory 16 times that.
    The rings on the device, `(fetch_slots + store_slots) · slot_bytes`, are obtained here; with a disk tier, also a
    ring of `load_slots · slot_bytes` of host memory, and the spill file is made, empty: it grows by `slot_bytes` and a
    page as records need it.

    Args:
        ledger: books everything. Its budget caps the tiers; without a disk budget there is no disk tier.
        device, dtype: of the rows.
        transport: what carries copies; None: streams on CUDA, threads on the CPU. It is closed with the manager.
        slot_bytes: bytes of a staging slot, a multiple of 4096; no record may be larger.
        fetch_slots, store_slots, load_slots: staging slots of the rings.
        pinner: how host memory is obtained, see `tiered.offload.pinning`.
        traffic: the class that submits jobs.

    Raises:
        OSError: no file can be made in `disk_path` any more.
        TierCapacityError: the rings do not fit the budget.
        ValueError: sizes that do not work, or a pinner that is not there.
    """
    device = pick_device(device)
    device_memory, host_memory = device_chunks(device), pick_pinner(pinner, device).allocate
    # Pinning costs by call as well as by byte, and neighbours merge into one copy within a chunk only.
    slabs = PINNED_SLABS if device.type == "cuda" else 1
    with ExitStack() as opened:
        arenas = {
            Tier.DEVICE: _arena(ledger, slot_bytes, Region.DEVICE_SLOT, device_memory, Tier.DEVICE),
            Tier.HOST: _arena(ledger, slot_bytes, Region.HOST_SLOT, host_memory, Tier.HOST, slabs),
        }
        for arena in arenas.values():
            opened.callback(arena.close)
        spill = _spill_file(ledger, slot_bytes, opened)
        ring = partial(_ring, ledger, slot_bytes, opened)
        rings = Rings(
            store=ring(Region.STORE_SLOT, store_slots, device_memory, Tier.DEVICE),
            fetch=ring(Region.FETCH_SLOT, fetch_slots, device_memory, Tier.DEVICE),
            load=None if spill is None else ring(Region.LOAD_SLOT, load_slots, host_memory, Tier.HOST),
        )
        transport = transport or _transport_for(device)
        opened.callback(transport.close)  # the last to come is the first to go: no copy outlives what it works on
        on_close = opened.pop_all().close
        return TierManager(
            ledger, arenas, spill, rings, transport, device=device, dtype=dtype, traffic=traffic, on_close=on_close
        )


def check_disk(budget: MemoryBudget) -> None:
    """See whether there can be the disk tier that `budget` has, if any: a file is made and closed again.

    Raises:
        OSError: no file can be made in `disk_path`.
        TierCapacityError: the disk has not as many bytes free.
    """
    cap = budget.cap(Tier.DISK)
    if cap and budget.disk_path is not None:
        with told_by_tier(Tier.DISK), closing(RecordFile(budget.disk_path)) as file:
            file.check_free(cap)


def _transport_for(device: torch.device) -> Transport:
    if device.type != "cuda":
        return ThreadTransport()
    from tiered.offload.cuda_transport import CudaTransport
    from tiered.offload.routes import crossover_for

    return CudaTransport(device, crossover=crossover_for(device))


def _arena(
    ledger: Ledger, slot_bytes: int, region: Region, allocate: Callable[[int], Chunk], tier: Tier, slabs: int = 1
) -> Arena:
    """Obtains `slabs` slabs at a time."""
    cap = ledger.budget.cap(tier)
    return Arena(region, slot_bytes, cap, allocate, *_booking(ledger, tier), chunk_bytes=slabs * slot_bytes)


def _booking(ledger: Ledger, tier: Tier) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """What books and unbooks bytes of `tier` that no record fills yet."""

    def grow(nbytes: int) -> None:
        ledger.allocate({Account.SPARE: nbytes}, tier, hint=KNOBS[tier])

    def shrink(nbytes: int) -> None:
        ledger.release({Account.SPARE: nbytes}, tier)

    return grow, shrink


def _ring(
    ledger: Ledger,
    slot_bytes: int,
    opened: ExitStack,
    region: Region,
    slots: int,
    allocate: Callable[[int], Chunk],
    tier: Tier,
) -> Ring:
    hint = "lower slot_bytes, fetch_slots or store_slots, or raise the budget"
    opened.enter_context(ledger.holding({Account.STAGING: slots * slot_bytes}, tier, hint=hint))
    try:
        chunk = allocate(slots * slot_bytes)
    except (ArenaFullError, PinError) as error:
        raise TierCapacityError(error.needed, getattr(error, "available", 0), tier, str(error)) from error
    opened.callback(chunk.free)
    rounding = chunk.actual_bytes - slots * slot_bytes
    opened.enter_context(ledger.holding({Account.STAGING: rounding}, tier, hint=hint))
    return Ring(slots, chunk.bytes, region, chunk.earlier)


def _spill_file(ledger: Ledger, slot_bytes: int, opened: ExitStack) -> SpillFile | None:
    """The disk tier, if the budget has one; it goes when the manager does."""
    folder = ledger.budget.disk_path
    if not ledger.budget.cap(Tier.DISK) or folder is None:
        return None
    # A slab has room for a record of a whole staging slot and its header.
    spill = SpillFile(folder, slot_bytes + UNIT, *_booking(ledger, Tier.DISK))
    opened.callback(spill.close)
    return spill
