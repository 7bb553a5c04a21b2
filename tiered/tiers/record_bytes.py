"""Books: what the records of one call take of each tier."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.offload.slabs import UNIT

LOAD_SLOTS = 2  # of host memory, where there is a disk tier, for records from disk where the host tier is full
_ABOUT_TO_BE_READ = 4  # slabs of records that cannot leave for others


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBytes:
    """Bytes of the hidden states that a policy keeps as records. Which clusters there are is known only once rows are
    clustered, so all of it is what the call takes at most.

    Attributes:
        tier: that keeps the records, and lends to the disk where it is the host.
        clusters: of one layer of one sequence.
        records: bytes of all records, in whichever tier keeps them.
        arena: bytes of the memory that they lie in, the padding of their slots included.
        file: the same in the disk tier.
        references: bytes on the device of what drift is measured with, and of the clusters' columns.
        banks: bytes on the device of the centroids that deltas are taken against.
        slot_bytes: of a staging slot that records arrive in; no record is larger.
        store_bytes: of one that they leave from, many at a time.
        slab_bytes: of what their memory is cut from.
        fetch_slots, store_slots: of the rings on the device.
        activations: bytes on the device that a step takes beside those of every call: where a few clusters may
            hold all rows, an update goes over all of them.
    """

    tier: Tier
    clusters: int
    records: int
    arena: int
    file: int
    references: int
    banks: int
    slot_bytes: int
    store_bytes: int
    slab_bytes: int
    fetch_slots: int
    store_slots: int
    activations: int

    @property
    def staging(self) -> int:
        """Bytes of the rings on the device."""
        return self.slot_bytes * self.fetch_slots + self.store_bytes * self.store_slots

    @property
    def device(self) -> dict[Account, int]:
        """Bytes of the device by account, beside what every call takes."""
        held = {Account.HIDDEN: self.records, Account.SPARE: self.arena - self.records}
        return {
            Account.CENTROIDS: self.references + self.banks,
            Account.STAGING: self.staging,
            Account.ACTIVATIONS: self.activations,
            **(held if self.tier is Tier.DEVICE else {}),
        }

    def below(self, budget: MemoryBudget) -> dict[Tier, dict[Account, int]]:
        """Bytes of host and disk by account; see `below_device`."""
        if self.tier is Tier.DEVICE:
            return rings_bytes(budget, self.slot_bytes)
        return below_device(
            budget,
            {Account.HIDDEN: self.records},
            arena=self.arena,
            file=self.file,
            slot_bytes=self.slot_bytes,
            slab_bytes=self.slab_bytes,
        )


def rings_bytes(budget: MemoryBudget, slot_bytes: int) -> dict[Tier, dict[Account, int]]:
    """What a disk tier takes of itself, whatever is in it; nothing without one."""
    ring = {Account.STAGING: LOAD_SLOTS * slot_bytes} if budget.cap(Tier.DISK) else {}
    return {Tier.HOST: ring, Tier.DISK: {}}


def below_device(
    budget: MemoryBudget,
    records: Mapping[Account, int],
    *,
    arena: int,
    file: int,
    slot_bytes: int,
    slab_bytes: int,
) -> dict[Tier, dict[Account, int]]:
    """Bytes of host and disk by account.

    Where `budget` has a disk tier, what the host's cap leaves no room for goes there. How records divide between the
    two depends on which are used, so that the figure of the disk is close, not a bound.

    Args:
        budget: of the call.
        records: bytes of all records.
        arena, file: bytes of the memory, or of the file, that holds them with the padding of their slots.
        slot_bytes: of a staging slot that records arrive in.
        slab_bytes: of a slab of the arena.
    """
    of_rings = rings_bytes(budget, slot_bytes)
    cap, total = budget.cap(Tier.HOST), sum(records.values())
    ring = sum(of_rings[Tier.HOST].values())
    if not ring or cap is None or ring + arena <= cap:
        of_rings[Tier.HOST] |= {**records, Account.SPARE: arena - total}
        return of_rings
    slabs = min(max(fewest_slabs(slot_bytes, slab_bytes), (cap - ring) // slab_bytes), arena // slab_bytes)
    # Records are spread over memory and file in proportion to what each has.
    here = {account: size * slabs * slab_bytes // arena for account, size in records.items()}
    there = {account: size - here[account] for account, size in records.items()}
    gone, slab = sum(there.values()), slab_bytes + UNIT
    taken = max(-(-file * gone // max(1, total) // slab) * slab, slab)
    return {
        Tier.HOST: of_rings[Tier.HOST] | here | {Account.SPARE: slabs * slab_bytes - sum(here.values())},
        Tier.DISK: {**there, Account.SPARE: taken - gone},
    }


def fewest_slabs(run_bytes: int, slab_bytes: int) -> int:
    """Slabs that hold a run of `run_bytes`: twice its bytes, since a record takes up to twice its share of a slab, and
    of each size class one that is filled in part; and some that fetches are about to read."""
    classes = isqrt(2 * run_bytes // UNIT)  # records of 1, 2, … n pages are n² / 2 pages and more
    return classes + -(-2 * run_bytes // slab_bytes) + _ABOUT_TO_BE_READ


def run_bytes(budget: MemoryBudget, *, slot_bytes: int, store_bytes: int, slab_bytes: int) -> int:
    """Bytes of records that are stored in one run. All of them have to be in the host tier before one can spill: where
    there is a disk tier, as much of a staging slot as the host's cap has slabs for, and no less than `slot_bytes`."""
    cap, most = budget.cap(Tier.HOST), store_bytes
    if budget.cap(Tier.DISK) and cap is not None:
        slabs = (cap - LOAD_SLOTS * slot_bytes) // slab_bytes
        while most > slot_bytes and fewest_slabs(most, slab_bytes) > slabs:
            most = max(slot_bytes, most // 2)
    return most
