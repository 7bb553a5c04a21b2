"""Where records lie: their slots in the arenas of device and host, and what of these is booked for them."""

from collections import Counter
from collections.abc import Mapping

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.arena import Arena, ArenaStats
from tiered.tiers.host_pool import told_by_tier
from tiered.tiers.record_book import Entry, RecordBook


class Slots:
    """Keeps the book of records, their slots and the ledger in step.

    Arenas book what they obtain as `SPARE`; what records fill of it is booked under their feature.
    """

    def __init__(self, ledger: Ledger, arenas: Mapping[Tier, Arena], book: RecordBook) -> None:
        """`arenas`: of device and host."""
        self._ledger, self._arenas, self._book = ledger, arenas, book
        self._taken: Counter[Tier] = Counter()

    def staged_bytes(self, nbytes: int) -> int:
        """Bytes that a record of `nbytes` takes in a staging slot: as many as in the host tier.

        Raises:
            ValueError: a record larger than a staging slot.
        """
        return self._arenas[Tier.HOST].book.room_for(nbytes)

    def host_memory(self) -> ArenaStats:
        """What the host tier holds."""
        return self._arenas[Tier.HOST].stats()

    def enter(self, entry: Entry) -> None:
        """Give a new entry a slot in its tier.

        Raises:
            TierCapacityError: the tier has no room.
        """
        tier, arena, nbytes = entry.tier, self._arenas[entry.tier], entry.form.nbytes
        capped = self._ledger.budget.cap(tier) is not None  # else it is the system that has no more
        with told_by_tier(tier, self._ledger.held(tier) if capped else None, arena.slab_bytes):
            entry.slot = arena.place(nbytes)
        self._ledger.rebook(Account.SPARE, Account(entry.key.feature), nbytes, tier)
        self._taken[tier] += nbytes

    def leave(self, entry: Entry | None) -> None:
        """Give back all that `entry` holds; None: nothing to do."""
        if entry is None:
            return
        if entry.slot is not None:
            entry.slot.release()
            entry.slot = None
            self._ledger.rebook(Account(entry.key.feature), Account.SPARE, entry.form.nbytes, entry.tier)
            self._taken[entry.tier] -= entry.form.nbytes
        entry.let_go_of_base()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where book, slots and ledger contradict each other."""
        self._book.check_integrity()
        held: Counter[Tier] = Counter()
        for entry in self._book.entries():
            held[entry.tier] += entry.form.nbytes
        for tier, arena in self._arenas.items():
            arena.check_integrity()
            if self._taken[tier] != held[tier]:
                raise RuntimeError(f"{tier} tier: {self._taken[tier]} bytes are taken, records hold {held[tier]}")
