"""What a tier manager is made of: its parts, their books, and their end."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy

import torch

from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.offload.arena import Arena
from tiered.offload.spill_file import SpillFile
from tiered.offload.transport import Transport
from tiered.tiers.record_book import Entry, RecordBook, RecordKey
from tiered.tiers.shipping import Rings, Shipping
from tiered.tiers.slots import Slots
from tiered.tiers.stats import TierStats, reporting
from tiered.tiers.ticket import Fetches
from tiered.tiers.traffic import Traffic


class TierLifetime:
    """The parts of a tier manager, from opening to closing.

    Attributes:
        device: where rows come from and go to.
        dtype: of the rows.
        slot_bytes: of a staging slot that records arrive in: no record may be larger.
    """

    def __init__(
        self,
        ledger: Ledger,
        arenas: Mapping[Tier, Arena],
        spill: SpillFile | None,
        rings: Rings,
        transport: Transport,
        *,
        device: torch.device,
        dtype: torch.dtype,
        on_close: Callable[[], None],
    ) -> None:
        """Memory, file and transport are the caller's; `on_close` gives them back."""
        self.device = device
        self.dtype = dtype
        self.slot_bytes = rings.fetch.slot_bytes
        self._run_bytes = rings.run_bytes or rings.store.slot_bytes
        self._ledger = ledger
        self._stats = TierStats()
        self._record = record = reporting(self._stats, ledger)
        self._book = book = RecordBook()
        self._traffic = jobs = Traffic(transport, record)
        self._slots = slots = Slots(ledger, arenas, spill, book, jobs, record)
        self._shipping = shipping = Shipping(jobs, slots, rings, ledger, device=device, dtype=dtype)
        self._fetches = Fetches(book, slots, jobs, shipping, record)
        self._on_close = on_close
        self._versions = 0

    def __len__(self) -> int:
        """How many records there are."""
        return len(self._book)

    def __contains__(self, key: object) -> bool:
        return key in self._book

    def progress(self) -> None:
        """Note which copies have ended, and send what waits for a staging slot. Never blocks."""
        self._fetches.send_waiting()

    def synchronize(self) -> None:
        """Block the host until every copy so far has ended."""
        self._traffic.synchronize()

    def stats(self) -> TierStats:
        """What happened so far; a copy."""
        self.progress()
        stats, host = deepcopy(self._stats), self._slots.host_memory()
        stats.pinned_requested, stats.pinned_actual = host.held_bytes, host.actual_bytes
        stats.pinned = host.pinned
        return stats

    def ended(self) -> TierStats:
        """`stats` once every copy has ended."""
        self.synchronize()
        return self.stats()

    def restart_stats(self) -> None:
        """Forget what happened so far."""
        self.progress()
        self._stats.restart()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where books, tickets, slots and ledger contradict each other."""
        self._slots.check_integrity()
        self._fetches.check_integrity()

    def close(self) -> None:
        """Wait for the copies under way, then give everything back: open tickets, records, memory, file and threads.
        May be called again."""
        if self._fetches.closed:
            return
        with ExitStack() as closing:  # the last one first, and every one whatever becomes of another
            closing.callback(self._on_close)
            closing.callback(self._leave_all)
            closing.callback(self._traffic.synchronize)
            closing.callback(self._fetches.close)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave_all(self) -> None:
        for entry in list(self._book.entries()):
            self._slots.leave(entry)

    def _find(self, key: RecordKey) -> Entry:
        if key not in self._book:
            raise KeyError(f"nothing is stored as {key}")
        entry = self._book.find(key)
        entry.check_there()
        return entry
