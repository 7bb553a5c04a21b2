"""Room for records in the three tiers: booked in the ledger before it is taken, and given back when it is left."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol, runtime_checkable

from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.arena import Arena, ArenaStats, Slot
from tiered.offload.errors import ArenaFullError, PinError
from tiered.offload.slabs import SlabBook
from tiered.offload.spill_file import DiskSlot
from tiered.tiers.record_book import Entry

KNOBS = {
    Tier.DEVICE: "raise memory=MemoryBudget(device=…), or keep fewer records on the device",
    Tier.HOST: "raise memory=MemoryBudget(host=…), or give a disk tier to spill to: MemoryBudget(disk=…, disk_path=…)",
    Tier.DISK: "raise memory=MemoryBudget(disk=…, disk_path=…)",
}


Room = Slot | DiskSlot  # some bytes of a tier; who takes them next finds what is unfinished there in its own fence


@runtime_checkable
class Storage(Protocol):
    """An arena, or the spill file."""

    book: SlabBook

    def place(self, nbytes: int) -> Room:
        """Take `nbytes`.

        Raises:
            ArenaFullError: there are not that many free in one piece.
        """
        ...

    def stats(self) -> ArenaStats: ...

    def check_integrity(self) -> None: ...


class Rooms:
    """The storages of the tiers that there are, and what the ledger holds for them.

    A storage books what it obtains as `SPARE` (`book_growth`); what records fill of it is booked under their feature.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._storages: dict[Tier, Storage] = {}
        self._taken: Counter[Tier] = Counter()

    def open(self, tier: Tier, storage: Storage) -> None:
        """`storage` serves `tier` from now on."""
        self._storages[tier] = storage

    def size(self, tier: Tier, nbytes: int) -> int:
        """Bytes of the slot that a record of `nbytes` takes in `tier`.

        Raises:
            ValueError: a record that no slot of the tier can hold.
        """
        return self._storages[tier].book.room_for(nbytes)

    def pinned(self) -> ArenaStats:
        """What the host tier holds."""
        return self._storages[Tier.HOST].stats()

    def take(self, tier: Tier, entry: Entry) -> Room:
        """Room for `entry` in `tier`, which the entry does not have yet.

        Raises:
            TierCapacityError: the tier is full, has no storage, or the system refuses to give it more.
        """
        nbytes = entry.form.nbytes
        if tier not in self._storages:
            raise TierCapacityError(nbytes, 0, tier, KNOBS[tier])
        with told_by_tier(tier, partial(self._total, tier)):
            room = self._storages[tier].place(nbytes)
        self._ledger.rebook(Account.SPARE, Account(entry.key.feature), nbytes, tier)
        self._taken[tier] += nbytes
        return room

    def reserve(self, tier: Tier, nbytes: int) -> None:
        """Obtain memory for `nbytes` of records in all, in a tier of memory. Errors as `take`."""
        storage = self._storages.get(tier)
        if not isinstance(storage, Arena):
            raise ValueError(f"only memory can be reserved, in the device or host tier; not in {tier}")
        with told_by_tier(tier, partial(self._total, tier)):
            storage.reserve(nbytes)

    def give_back(self, tier: Tier, entry: Entry, room: Room) -> None:
        """`entry` has left `room`."""
        room.release()
        self._ledger.rebook(Account(entry.key.feature), Account.SPARE, entry.form.nbytes, tier)
        self._taken[tier] -= entry.form.nbytes

    def check_integrity(self, held: Mapping[Tier, int]) -> None:
        """Raise `RuntimeError` where the rooms are not those of records with `held` bytes by tier."""
        for tier, storage in self._storages.items():
            storage.check_integrity()
            if self._taken[tier] != held.get(tier, 0):
                raise RuntimeError(
                    f"{tier} tier: {self._taken[tier]} bytes are taken, records hold {held.get(tier, 0)}"
                )
        self._ledger.check_integrity()

    def _total(self, tier: Tier, needed: int) -> int | None:
        """The cap that would do; None without one: it is the system that has no more. Storages grow by whole slabs."""
        if self._ledger.budget.cap(tier) is None:
            return None
        return self._ledger.held(tier) + max(needed, self._storages[tier].book.slab_bytes)


@contextmanager
def told_by_tier(tier: Tier, total: Callable[[int], int | None] | None = None) -> Iterator[None]:
    """What a storage lacks, as the error of the public contract. `total`: the cap that would do, from the bytes that a
    record needs."""
    try:
        yield
    except ArenaFullError as error:
        enough = None if error.hint or total is None else total(error.needed)
        hint = error.hint or KNOBS[tier]
        raise TierCapacityError(error.needed, error.available, tier, hint, enough) from error
    except PinError as error:
        raise TierCapacityError(error.needed, 0, tier, str(error)) from error
