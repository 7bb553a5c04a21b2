"""The fetches under way: which batches wait for a staging slot, which have set out, and who reads what."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.errors import RecordLostError
from tiered.core.events import Asked
from tiered.core.features import Tier
from tiered.offload.errors import TransferError
from tiered.tiers.batches import Batch, cut
from tiered.tiers.journal import Journal
from tiered.tiers.placement import Placement
from tiered.tiers.record import RecordKey
from tiered.tiers.record_book import Entry, EntryState, RecordBook, nbytes_of
from tiered.tiers.shipping import Shipping
from tiered.tiers.ticket import Ticket
from tiered.tiers.traffic import Traffic


class Fetches:
    """Batches of records on their way up, first come first served, and the open tickets that want them.

    Attributes:
        device, dtype: of the rows.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        slot_bytes: int,
        book: RecordBook,
        traffic: Traffic,
        placement: Placement,
        shipping: Shipping,
        journal: Journal,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._slot_bytes = slot_bytes
        self._book = book
        self._traffic = traffic
        self._placement = placement
        self._shipping = shipping
        self._journal = journal
        self._waiting: list[Batch] = []
        self._tickets: set[Ticket] = set()

    def begin(
        self,
        keys: Sequence[RecordKey],
        entries: Sequence[Entry],
        check_open: Callable[[], None],
        *,
        paged: bool = False,
    ) -> Ticket:
        """A ticket for `entries`, those of `keys`. `check_open` raises once the manager cannot be used any more;
        `paged`: see `TierManager.fetch`."""
        widths = {entry.form.width for entry in entries}
        if len(widths) != 1:
            raise ValueError(f"a fetch is of one or more records of one width: {len(keys)} keys have {sorted(widths)}")
        first = [0, *accumulate(entry.form.rows for entry in entries)]
        batches = cut(entries, first, partial(self._placement.rooms.size, Tier.HOST), self._slot_bytes)
        for batch in batches:
            batch.paged = paged
        for entry in entries:
            self._book.begin_reading(entry)
            if entry.base is not None:
                entry.base.bank.hold()
        ticket = Ticket(self, keys, batches, (first[-1], widths.pop()), check_open)
        self._tickets.add(ticket)
        for batch in batches:
            self._journal.add(Asked(tier=batch.tier, records=len(batch.entries), nbytes=nbytes_of(batch.entries)))
        self._waiting.extend(batch for batch in batches if batch.tier is not Tier.DEVICE)
        self.send_waiting()
        return ticket

    def send_waiting(self) -> None:
        """Let batches set out while there are staging slots. Never blocks."""
        self._traffic.harvest()
        free = {paged: self._shipping.free_slots(paged=paged) for paged in (False, True)}
        for batch in list(self._waiting) if any(free.values()) else []:
            if free[batch.paged]:
                with suppress(RecordLostError, TransferError):  # told to whoever waits for the batch
                    self._send(batch)
                self._waiting.remove(batch)
                free[batch.paged] = self._shipping.free_slots(paged=batch.paged)

    def use(self, batch: Batch, out: Float[Tensor, "any width"], rows: Int[Tensor, " answer"] | None) -> None:
        """Decode `batch` into `out`. Errors as `Ticket.wait`."""
        self.send_waiting()
        if batch.buffer is None:
            self._send(batch)
            if batch in self._waiting:
                self._waiting.remove(batch)
        event = self._shipping.decode(batch, out, rows)
        self._end_reading(batch)
        self._let_go_of_bases(batch)
        if event.done():
            event.synchronize()
        self.send_waiting()

    def give_up(self, ticket: Ticket, unused: Sequence[Batch]) -> None:
        """`ticket` is closed, and will not use these batches."""
        self._tickets.discard(ticket)
        for batch in unused:
            if batch in self._waiting:
                self._waiting.remove(batch)
            self._end_reading(batch)
            self._shipping.give_back(batch)
            self._let_go_of_bases(batch)

    def readers(self) -> Counter[int]:
        """How many open tickets read each entry, by its `id`: what the book has to say too."""
        return Counter(id(entry) for ticket in self._tickets for entry in ticket.unread())

    def close(self) -> None:
        """Close every ticket."""
        for ticket in list(self._tickets):
            ticket.close()

    def _send(self, batch: Batch) -> None:
        """Let a batch set out; its records may be evicted from then on."""
        for entry in batch.entries:
            check_there(entry)
        self._shipping.send_up(batch)
        self._end_reading(batch)

    def _end_reading(self, batch: Batch) -> None:
        if batch.reading:
            batch.reading = False
            for entry in batch.entries:
                if self._book.end_reading(entry):
                    self._placement.leave(entry)

    def _let_go_of_bases(self, batch: Batch) -> None:
        for base in batch.bases:
            if base is not None:
                base.bank.release()
        batch.bases = ()


def check_there(entry: Entry) -> None:
    """Raise RecordLostError where no tier holds the bytes of `entry`."""
    if entry.state is EntryState.LOST:
        raise RecordLostError(f"{entry.key} is lost: a copy of it failed; store it again")
