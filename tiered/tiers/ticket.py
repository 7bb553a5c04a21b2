"""Fetches under way: where each has got to and where its rows go; which of them hold staging slots, and which wait."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.errors import RecordLostError, TierCapacityError
from tiered.core.events import Asked, TierEvent
from tiered.core.features import Tier
from tiered.offload.errors import TransferError
from tiered.tiers.batches import Batch, Destination, cut
from tiered.tiers.record_book import Entry, EntryState, RecordBook, RecordKey, nbytes_of
from tiered.tiers.shipping import Shipping
from tiered.tiers.slots import Slots
from tiered.tiers.traffic import Traffic


class Ticket:
    """What `TierManager.fetch` returns. `wait` gives the rows, in the order of the keys; or `close` gives it up.

    An open ticket holds records and staging slots, so every ticket has to be waited for or closed.

    Attributes:
        keys: what was asked for.
        shape: (rows, width) of the answer.
        nbytes: of the records.
    """

    def __init__(
        self,
        fetches: "Fetches",
        keys: Sequence[RecordKey],
        batches: Sequence[Batch],
        to: Destination,
        shape: tuple[int, int],
    ) -> None:
        self.keys = tuple(keys)
        self.shape = shape
        self.nbytes = sum(nbytes_of(batch.entries) for batch in batches)
        self._fetches, self._batches, self._to = fetches, batches, to
        self._open = True

    def unread(self) -> Iterator[Entry]:
        """The entries whose bytes no copy has been sent for: a reader of each is this ticket."""
        for batch in self._batches:
            if batch.reading:
                yield from batch.entries

    def into(self, out: Float[Tensor, "any width"], rows: Int[Tensor, " rows"] | None = None) -> None:
        """Say where the rows go, as for `wait`, if `fetch` has not been told. From then on they may be written at any
        time, and nothing else may touch these places until `wait` or `close`.

        Raises:
            ValueError: waited for or closed before, with a destination, or `out` or `rows` does not fit.
        """
        self._check()
        if self._to.out is not None:
            raise ValueError("the rows of this ticket go to another tensor already; wait without `out`")
        Destination(out, rows).check(self.shape)
        self._to.out, self._to.rows = out, rows

    def wait(
        self,
        out: Float[Tensor, "any width"] | None = None,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> Float[Tensor, "any width"]:
        """Let compute wait for the records and decode them: row i of the answer goes to `out[rows[i]]`.

        On CUDA the host does not wait; the answer is ordered on the caller's current stream, as that of any kernel.

        Args:
            out: on the device, in any float dtype; None: where they were said to go, or else a new tensor of `shape` in
                the manager's dtype.
            rows: distinct places in `out`; None: from its first row on.

        Raises:
            ValueError: as `into`. The ticket stays open.
            RecordLostError, TransferError: a record's bytes are gone, or its copy failed. The ticket is closed.
            TierCapacityError: every staging slot holds replaced records that go nowhere yet, and the budget has no room
                to set some aside. The ticket is closed.
        """
        self._check()
        Destination(out, rows).check(self.shape)
        if out is not None or self._to.out is None:
            self.into(self._fetches.new_answer(self.shape) if out is None else out, rows)
        try:
            # Those that have set out give back the slots that the others wait for.
            for batch in sorted(self._batches, key=lambda batch: batch.buffer is None):
                self._fetches.land(batch)
        finally:
            self.close()
        assert self._to.out is not None, "what was decoded went somewhere"
        return self._to.out

    def close(self) -> None:
        """Give up what has not been decoded. May be called again."""
        if self._open:
            self._open = False
            self._fetches.give_up(self, self._batches)

    def _check(self) -> None:
        if not self._open:
            raise ValueError("this ticket was waited for or closed already; fetch again")
        self._fetches.check_open()

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fetches:
    """Batches of records on their way up, and the open tickets that want them.

    A ticket always progresses. If it is waited for and no staging slot is free, another batch gives its slot up. The
    first batch under way that has a destination is decoded there, at no cost: copies arrive in the order in which they
    set out. If no batch has one, the last goes back behind those that wait; if its records were replaced meanwhile, its
    bytes are set aside, which books them.
    """

    def __init__(
        self,
        book: RecordBook,
        slots: Slots,
        traffic: Traffic,
        shipping: Shipping,
        record: Callable[[TierEvent], None],
    ) -> None:
        self._book, self._slots, self._traffic, self._shipping = book, slots, traffic, shipping
        self._record, self.closed, self._process = record, False, os.getpid()
        self._tickets: set[Ticket] = set()
        self._waiting: list[Batch] = []
        self._air: list[Batch] = []  # with a staging slot, in the order in which they set out

    def begin(self, keys: Sequence[RecordKey], entries: Sequence[Entry], to: Destination) -> Ticket:
        widths = {entry.form.width for entry in entries}
        if len(widths) != 1:
            raise ValueError(f"a fetch is of one or more records of one width: {len(keys)} keys have {sorted(widths)}")
        first = [0, *accumulate(entry.form.rows for entry in entries)]
        shape = first[-1], widths.pop()
        to.check(shape)
        batches = cut(entries, first, to, self._slots.staged_bytes, self._shipping.slot_bytes)
        for entry in entries:
            self._book.begin_reading(entry)
            if entry.base is not None:
                entry.base.bank.hold()
        ticket = Ticket(self, keys, batches, to, shape)
        self._tickets.add(ticket)
        for batch in batches:
            self._record(Asked(tier=batch.tier, records=len(batch.entries), nbytes=nbytes_of(batch.entries)))
        self._waiting.extend(batch for batch in batches if batch.tier is not Tier.DEVICE)
        self.send_waiting()
        return ticket

    def new_answer(self, shape: tuple[int, int]) -> Float[Tensor, "rows width"]:
        """Room for the rows of a ticket without a destination."""
        return torch.empty(shape, dtype=self._shipping.dtype, device=self._shipping.device)

    def send_waiting(self) -> None:
        """Let batches set out while there are staging slots, those with a destination first. Never waits for a copy."""
        self._traffic.harvest()
        for batch in sorted(self._waiting, key=lambda batch: batch.to.out is None):
            first = None if self._shipping.free_slots else self._first()
            if first is not None and first.arrival is not None and first.arrival.done():
                self._decode_for_others(first)
            if not self._shipping.free_slots:
                break
            with suppress(RecordLostError, TransferError):  # told by `land`
                self._send(batch)

    def land(self, batch: Batch) -> None:
        """Decode `batch` to its destination, which it has. Errors as `Ticket.wait`."""
        if batch.landed is None:
            self.send_waiting()
        if batch.landed is None:
            if batch.buffer is None:
                self._free_a_slot()
                self._send(batch)
            while batch in self._air and (earlier := self._first()) is not batch:
                assert earlier is not None, "the batch itself has a destination"
                self._decode_for_others(earlier)
            self._decode(batch)
            self.send_waiting()
        assert batch.landed is not None, "it has been decoded"
        if batch.landed.done():
            batch.landed.synchronize()

    def land_all(self) -> bool:
        """Decode every batch that has a destination, so that all of their records may be evicted. Whether any did."""
        batches = [batch for batch in (*self._air, *self._waiting) if batch.to.out is not None]
        for batch in batches:
            # Told when their own ticket is waited for.
            with suppress(RecordLostError, TransferError, TierCapacityError):
                self.land(batch)
        return bool(batches)

    def give_up(self, ticket: Ticket, batches: Iterable[Batch]) -> None:
        """Drop the batches of a closed ticket that are not decoded."""
        self._tickets.discard(ticket)
        for batch in batches:
            if batch.landed is None:
                self._forget(batch)
                self._shipping.give_back(batch)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless the book's readers are the open tickets, and the slots' holders the batches."""
        readers = Counter(id(entry) for ticket in self._tickets for entry in ticket.unread())
        for entry in self._book.entries():
            if entry.readers != readers[id(entry)]:
                raise RuntimeError(f"{entry.key} has {entry.readers} readers, open tickets {readers[id(entry)]}")
        self._shipping.check_integrity(len(self._air))

    def check_open(self) -> None:
        """Raise `ValueError` once the manager is closed, and `TransferError` in a forked process."""
        if os.getpid() != self._process:
            raise TransferError("the threads of a tier manager do not survive a fork: open tiers in this process")
        if self.closed:
            raise ValueError("this tier manager is closed")

    def close_tickets(self) -> None:
        for ticket in list(self._tickets):
            ticket.close()

    def close(self) -> None:
        self.closed = True
        self.close_tickets()

    def _free_a_slot(self) -> None:
        if self._shipping.free_slots:
            return
        if first := self._first():
            self._decode_for_others(first)
            return
        for batch in reversed(self._air):
            if all(entry.state is EntryState.STORED and entry.slots for entry in batch.entries):
                for entry in batch.entries:
                    self._book.begin_reading(entry)
                batch.reading, batch.arrival = True, None
                self._shipping.give_back(batch)
                self._waiting.append(batch)
                break
        else:
            batch = self._air[-1]
            self._shipping.set_aside(batch)
        self._air.remove(batch)

    def _send(self, batch: Batch) -> None:
        """Let a batch set out; its records may be evicted from then on."""
        if batch in self._waiting:
            self._waiting.remove(batch)
        for entry in batch.entries:
            entry.check_there()
        self._shipping.send_up(batch)
        self._air.append(batch)
        self._end_reading(batch)

    def _first(self) -> Batch | None:
        """The first batch to arrive that has a destination."""
        return next((batch for batch in self._air if batch.to.out is not None), None)

    def _decode_for_others(self, batch: Batch) -> None:
        with suppress(TransferError):  # told by `land`
            self._decode(batch)

    def _decode(self, batch: Batch) -> None:
        try:
            batch.landed = self._shipping.decode(batch)
        finally:
            self._forget(batch)

    def _forget(self, batch: Batch) -> None:
        for queue in (self._waiting, self._air):
            if batch in queue:
                queue.remove(batch)
        self._end_reading(batch)
        for base in batch.bases:
            if base is not None:
                base.bank.release()
        batch.bases = ()

    def _end_reading(self, batch: Batch) -> None:
        if batch.reading:
            batch.reading = False
            for entry in batch.entries:
                if self._book.end_reading(entry):
                    self._slots.leave(entry)
