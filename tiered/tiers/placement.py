"""Where records lie: room for new ones, moves down and back up, and what becomes of a record whose copy fails."""

from collections.abc import Callable
from functools import partial

from jaxtyping import UInt8
from torch import Tensor

from tiered.core import events
from tiered.core.errors import TierCapacityError
from tiered.core.events import Evicted, Lost
from tiered.core.features import Tier
from tiered.offload.arena import Slot
from tiered.offload.fence import Fence
from tiered.offload.spill_file import DiskSlot, SpillFile
from tiered.offload.transport import Copy, Lane
from tiered.tiers.eviction import eviction_order
from tiered.tiers.record_book import Entry, RecordBook
from tiered.tiers.rooms import Room, Rooms
from tiered.tiers.traffic import Traffic

BELOW = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DISK}


class Placement:
    """Keeps the book of records, the rooms of the tiers and the copies between them in step.

    A move changes the books at once and lets the copy follow: who uses the bytes finds the copy in their fence. If it
    fails, the books learn it when the traffic is harvested.
    """

    def __init__(
        self,
        book: RecordBook,
        rooms: Rooms,
        traffic: Traffic,
        spill: SpillFile | None,
        record: Callable[[events.Event], None],
    ) -> None:
        self._book = book
        self.rooms = rooms
        self._traffic = traffic
        self._spill = spill
        self._record = record

    def room(self, tier: Tier, entry: Entry) -> Room:
        """Room for `entry` in `tier`; other records move down for it where they have to.

        Raises:
            TierCapacityError: no record that may leave makes enough room.
        """
        try:
            return self.rooms.take(tier, entry)
        except TierCapacityError as full:
            for victim in eviction_order(self._book.entries(), tier) if tier in BELOW else []:
                try:
                    self.move_down(victim, tier)
                except TierCapacityError as below:
                    # The clean ones went first, so every other victim would need room below as well.
                    if self._spill is not None and below.tier is Tier.DISK:
                        raise  # no tier is left, and what the disk says is what helps
                    raise full from below
                try:
                    return self.rooms.take(tier, entry)
                except TierCapacityError as still_full:
                    full = still_full
            raise full

    def enter(self, entry: Entry, tier: Tier) -> None:
        """Give a new entry room in `tier`. Errors as `room`."""
        self._book.place(entry, tier, self.room(tier, entry))

    def move_down(self, entry: Entry, tier: Tier) -> None:
        """Take `entry` out of `tier`; its bytes go to the tier below, unless the disk has them.

        Raises:
            TierCapacityError: the tier below has no room for it. Nothing has changed.
        """
        clean = entry.clean
        if not clean:
            below = BELOW[tier]
            room = self.room(below, entry)
            source = entry.places[tier]
            failed = partial(self.copy_failed, entry, below, room)
            if isinstance(room, DiskSlot):
                assert self._spill is not None, "a disk slot is in the file"
                work = partial(self._spill.write, room, str(entry.key), entry.version, source.bytes)
                self._traffic.run(
                    Lane.SPILL, work, reads=[source.fence], writes=[room.fence], failed=failed, layer=entry.key.layer
                )
            else:
                copies = [Copy(source.bytes, room.bytes)]
                self._traffic.copy(
                    Lane.STORE, copies, reads=[source.fence], writes=[room.fence], failed=failed, layer=entry.key.layer
                )
            self._book.place(entry, below, room)
        self._vacate(entry, tier)
        self._record(Evicted(tier=tier, records=1, nbytes=entry.form.nbytes, clean=clean))

    def load(self, entry: Entry) -> None:
        """Bring `entry` from disk to the host tier; it stays on disk too, and so is clean.

        Raises:
            TierCapacityError: no room in the host tier. Nothing has changed.
        """
        room, source = self.room(Tier.HOST, entry), entry.places[Tier.DISK]
        assert isinstance(room, Slot), "the host tier is an arena"

        def failed() -> None:  # neither what the disk has is the entry, nor what came of it
            self.copy_failed(entry, Tier.DISK, source)
            self.copy_failed(entry, Tier.HOST, room)

        self.read(entry, room.bytes, room.fence, failed)
        self._book.place(entry, Tier.HOST, room)

    def read(
        self,
        entry: Entry,
        into: UInt8[Tensor, " nbytes"],
        fence: Fence,
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Read `entry` from disk into host memory that `fence` guards. `failed` says what that means to the books:
        that the disk does not have it, unless told otherwise."""
        source = entry.places[Tier.DISK]
        assert self._spill is not None, "a record on disk is in the file"
        work = partial(self._spill.read, source, str(entry.key), entry.version, into)
        failed = failed or partial(self.copy_failed, entry, Tier.DISK, source)
        self._traffic.run(Lane.LOAD, work, reads=[source.fence], writes=[fence], failed=failed, layer=entry.key.layer)

    def leave(self, entry: Entry | None) -> None:
        """Give back all that `entry` holds; None: nothing to do."""
        if entry is not None:
            for tier in list(entry.places):
                self._vacate(entry, tier)
            self._let_go_of_base(entry)

    def copy_failed(self, entry: Entry, tier: Tier, room: Room) -> None:
        """The bytes in `room` are not those of `entry`. It may have left it since, or have them elsewhere."""
        if entry.places.get(tier) is room:
            self._vacate(entry, tier)
            if not entry.places:
                self._book.lose(entry)
                self._let_go_of_base(entry)
                self._record(
                    Lost(records=1, reason=f"{entry.key}: its copy in the {tier} tier is not what it should be")
                )

    def _vacate(self, entry: Entry, tier: Tier) -> None:
        self.rooms.give_back(tier, entry, self._book.displace(entry, tier))

    def _let_go_of_base(self, entry: Entry) -> None:
        """`entry` will not be decoded any more."""
        if entry.base is not None:
            entry.base.bank.release()
            entry.base = None
