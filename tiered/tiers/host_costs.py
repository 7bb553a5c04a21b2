"""Books: what records below the device take of host and disk."""

from collections.abc import Mapping

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.offload.slabs import UNIT

LOAD_SLOTS = 2  # of host memory, where there is a disk tier
DISK_HEADER = 64  # bytes in front of each record in the file
# Slabs that the host tier needs where records spill: those of one store may be of as many classes.
_FEWEST_SLABS = 16


def rings_bytes(budget: MemoryBudget, slot_bytes: int) -> dict[Tier, dict[Account, int]]:
    """What a disk tier takes of itself, whatever is in it; nothing without one."""
    ring = {Account.STAGING: LOAD_SLOTS * slot_bytes} if budget.cap(Tier.DISK) else {}
    return {Tier.HOST: ring, Tier.DISK: {}}


def below_device(
    budget: MemoryBudget, records: Mapping[Account, int], *, arena: int, file: int, slot_bytes: int
) -> dict[Tier, dict[Account, int]]:
    """Bytes of host and disk by account.

    Where `budget` has a disk tier, what the host's cap leaves no room for goes there. How records divide between the
    two depends on which are used, so that the figure of the disk is close, not a bound.

    Args:
        budget: of the call.
        records: bytes of all records.
        arena, file: bytes of the memory, or of the file, that holds them with the padding of their slots.
        slot_bytes: of a staging slot, which is a slab of the arena.
    """
    of_rings = rings_bytes(budget, slot_bytes)
    cap, total = budget.cap(Tier.HOST), sum(records.values())
    ring = sum(of_rings[Tier.HOST].values())
    if not ring or cap is None or ring + arena <= cap:
        of_rings[Tier.HOST] |= {**records, Account.SPARE: arena - total}
        return of_rings
    slabs = min(max(_FEWEST_SLABS, (cap - ring) // slot_bytes), arena // slot_bytes)
    # Records are spread over memory and file in proportion to what each has.
    here = {account: size * slabs * slot_bytes // arena for account, size in records.items()}
    there = {account: size - here[account] for account, size in records.items()}
    gone, slab = sum(there.values()), slot_bytes + UNIT
    taken = max(-(-file * gone // max(1, total) // slab) * slab, slab)
    return {
        Tier.HOST: of_rings[Tier.HOST] | here | {Account.SPARE: slabs * slot_bytes - sum(here.values())},
        Tier.DISK: {**there, Account.SPARE: taken - gone},
    }
