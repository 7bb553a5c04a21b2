"""Where records lie: slots for new ones, moves down and back up, and what becomes of a record whose copy fails."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from jaxtyping import UInt8
from torch import Tensor

from tiered.core.errors import TierCapacityError
from tiered.core.events import Evicted, Lost, TierEvent
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.arena import Arena, ArenaStats, Slot
from tiered.offload.fence import Fence
from tiered.offload.spill_file import DiskSlot, SpillFile
from tiered.offload.transport import Copy, Lane
from tiered.tiers.host_pool import KNOBS, told_by_tier
from tiered.tiers.record_book import Entry, RecordBook
from tiered.tiers.traffic import Traffic

BELOW = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DISK}


class Slots:
    """Keeps the book of records, the slots in the tiers, the ledger and the copies between the tiers in step.

    A move changes the books at once and lets the copy follow: what uses the bytes finds the copy in their fence. If it
    fails, the books learn it when the traffic is harvested. Arenas and file book what they obtain as `SPARE`; what
    records fill of it is booked under their feature.
    """

    def __init__(
        self,
        ledger: Ledger,
        arenas: Mapping[Tier, Arena],
        spill: SpillFile | None,
        book: RecordBook,
        traffic: Traffic,
        record: Callable[[TierEvent], None],
    ) -> None:
        """`arenas`: of device and host; `spill`: the disk tier, if there is one; `record`: told what happens."""
        self._ledger = ledger
        self._arenas = arenas
        self._spill = spill
        self._storages: dict[Tier, Arena | SpillFile] = {**arenas} if spill is None else {**arenas, Tier.DISK: spill}
        self._taken: Counter[Tier] = Counter()
        self._book = book
        self._traffic = traffic
        self._record = record

    def staged_bytes(self, nbytes: int) -> int:
        """Bytes that a record of `nbytes` takes in a staging slot: as many as in the host tier.

        Raises:
            ValueError: a record larger than a staging slot.
        """
        return self._arenas[Tier.HOST].book.room_for(nbytes)

    def host_memory(self) -> ArenaStats:
        """What the host tier holds."""
        return self._arenas[Tier.HOST].stats()

    def enter(self, entry: Entry, tier: Tier) -> None:
        """Give a new entry a slot in `tier`; other records move down for it where they have to.

        Raises:
            TierCapacityError: no record that may leave makes enough room.
        """
        self._book.put(entry, tier, self._slot(tier, entry))

    def move_down(self, entry: Entry, tier: Tier) -> None:
        """Take `entry` out of `tier`; its bytes go to the tier below, unless the disk has them.

        Raises:
            TierCapacityError: the tier below has no room for it. Nothing has changed.
        """
        clean = entry.clean
        if not clean:
            below = BELOW[tier]
            slot, source = self._slot(below, entry), entry.slots[tier]
            assert isinstance(source, Slot), "what moves down lies in memory"
            if isinstance(slot, Slot):
                lane, work = Lane.STORE, [Copy(source.bytes, slot.bytes)]
            else:
                assert self._spill is not None, "a disk slot is in the file"
                lane, work = Lane.SPILL, partial(self._spill.write, slot, str(entry.key), entry.version, source.bytes)
            failed = partial(self.copy_failed, entry, below, slot)
            self._traffic.move(
                lane, work, reads=[source.fence], writes=[slot.fence], failed=failed, layer=entry.key.layer
            )
            self._book.put(entry, below, slot)
        self._vacate(entry, tier)
        self._record(Evicted(tier=tier, records=1, nbytes=entry.form.nbytes, clean=clean))

    def load(self, entry: Entry) -> None:
        """Bring `entry` from disk to the host tier; it stays on disk too, and so is clean.

        Raises:
            TierCapacityError: no room in the host tier. Nothing has changed.
        """
        slot, source = self._slot(Tier.HOST, entry), entry.slots[Tier.DISK]
        assert isinstance(slot, Slot), "the host tier is an arena"

        def failed() -> None:  # neither what the disk has is the entry, nor what came of it
            self.copy_failed(entry, Tier.DISK, source)
            self.copy_failed(entry, Tier.HOST, slot)

        self.read(entry, slot.bytes, slot.fence, failed)
        self._book.put(entry, Tier.HOST, slot)

    def read(
        self,
        entry: Entry,
        into: UInt8[Tensor, " nbytes"],
        fence: Fence,
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Read `entry` from disk into host memory that `fence` guards. `failed` says what that means to the books:
        that the disk does not have it, unless told otherwise."""
        source = entry.slots[Tier.DISK]
        assert not isinstance(source, Slot), "a record on disk is in a file"
        work = partial(source.read, str(entry.key), entry.version, into)
        failed = failed or partial(self.copy_failed, entry, Tier.DISK, source)
        self._traffic.move(Lane.LOAD, work, reads=[source.fence], writes=[fence], failed=failed, layer=entry.key.layer)

    def leave(self, entry: Entry | None) -> None:
        """Give back all that `entry` holds; None: nothing to do."""
        if entry is not None:
            for tier in list(entry.slots):
                self._vacate(entry, tier)
            entry.let_go_of_base()

    def copy_failed(self, entry: Entry, tier: Tier, slot: Slot | DiskSlot) -> None:
        """The bytes in `slot` are not those of `entry`. It may have left it since, or have them elsewhere."""
        if entry.slots.get(tier) is slot:
            self._vacate(entry, tier)
            if not entry.slots:
                self._book.lose(entry)
                entry.let_go_of_base()
                self._record(
                    Lost(records=1, reason=f"{entry.key}: its copy in the {tier} tier is not what it should be")
                )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where book, slots and ledger contradict each other."""
        self._book.check_integrity()
        held: Counter[Tier] = Counter()
        for entry in self._book.entries():
            for tier in entry.slots:
                held[tier] += entry.form.nbytes
        for tier, storage in self._storages.items():
            storage.check_integrity()
            if self._taken[tier] != held[tier]:
                raise RuntimeError(f"{tier} tier: {self._taken[tier]} bytes are taken, records hold {held[tier]}")
        self._ledger.check_integrity()

    def _slot(self, tier: Tier, entry: Entry) -> Slot | DiskSlot:
        """A slot for `entry` in `tier`, from which other records move down for it. Errors as `enter`."""
        try:
            return self._free_slot(tier, entry)
        except TierCapacityError as full:
            for victim in self._book.leavers(tier) if tier in BELOW else []:
                try:
                    self.move_down(victim, tier)
                except TierCapacityError as below:
                    # The clean ones went first, so every other victim would need room below as well.
                    if self._spill is not None and below.tier is Tier.DISK:
                        raise  # no tier is left, and what the disk says is what helps
                    raise full from below
                try:
                    return self._free_slot(tier, entry)
                except TierCapacityError as still_full:
                    full = still_full
            raise full

    def _free_slot(self, tier: Tier, entry: Entry) -> Slot | DiskSlot:
        """A slot that no record has to leave. Raises TierCapacityError where there is none."""
        nbytes, storage = entry.form.nbytes, self._storages.get(tier)
        if storage is None:
            raise TierCapacityError(nbytes, 0, tier, KNOBS[tier])
        capped = self._ledger.budget.cap(tier) is not None  # else it is the system that has no more
        with told_by_tier(tier, self._ledger.held(tier) if capped else None, storage.slab_bytes):
            slot = storage.place(nbytes)
        self._ledger.rebook(Account.SPARE, Account(entry.key.feature), nbytes, tier)
        self._taken[tier] += nbytes
        return slot

    def _vacate(self, entry: Entry, tier: Tier) -> None:
        entry.slots.pop(tier).release()
        self._ledger.rebook(Account(entry.key.feature), Account.SPARE, entry.form.nbytes, tier)
        self._taken[tier] -= entry.form.nbytes
