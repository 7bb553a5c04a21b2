"""The tier manager: stores rows as records on the device or in host memory, and fetches them back.

    rows ──encode──▶ store slot ──STORE──▶ host slot
           compute    (device)              │
    rows ◀─decode─── fetch slot ◀──FETCH────┘
           compute    (device)

Nothing here waits for a copy. What has to wait for what is in the fences of the slots (`Traffic`), so a slot is given
back as soon as its last job is submitted, and its next holder finds that job in its fence. One thread of the
caller uses a manager; copies run on the transport's streams and threads.
"""

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.errors import TierCapacityError
from tiered.core.events import Stored
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.offload.arena import Arena, device_chunks
from tiered.offload.codec_bytes import Codec
from tiered.offload.errors import TransferError
from tiered.offload.fence import Region
from tiered.offload.transport import Transport
from tiered.tiers.arguments import check_rows, checked_forms
from tiered.tiers.banks import CentroidBank, DeltaBase, banks_of
from tiered.tiers.batches import Destination, runs
from tiered.tiers.host_pool import HostPool, booked
from tiered.tiers.record_book import Entry, RecordBook, RecordForm, RecordKey, nbytes_of
from tiered.tiers.record_bytes import StagingSizes
from tiered.tiers.shipping import Rings, Shipping
from tiered.tiers.slots import Slots
from tiered.tiers.stats import TierStats
from tiered.tiers.ticket import Fetches, Ticket
from tiered.tiers.tiers import Tiers


class TierManager(Tiers):
    """Records of rows on the device and in host memory, under one budget; `open_tiers` makes one.

    `store` and `fetch` never wait for a copy. A fetch answers with what was stored when it was asked, whatever is
    stored under the same keys meanwhile; a delta is decoded against the centroids that it was made with.

    Attributes:
        dtype: of the rows.
        slot_bytes: bytes of a staging slot that records arrive in: no record may be larger.
    """

    def __init__(
        self,
        ledger: Ledger,
        sizes: StagingSizes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        transport: Transport | None = None,
        pool: HostPool | None = None,
        expected_bytes: Mapping[Tier, int] = MappingProxyType({}),
    ) -> None:
        """As `open_tiers`."""
        super().__init__(ledger, device=device, transport=transport, pool=pool)
        self.dtype, self.slot_bytes, self._run_bytes = dtype, sizes.slot_bytes, sizes.store
        self._process = os.getpid()
        try:
            memory = {
                Tier.DEVICE: booked(ledger, Tier.DEVICE, device_chunks(device)),
                Tier.HOST: partial(self.pool.take, unit=sizes.slab),
            }
            regions = {Tier.DEVICE: Region.DEVICE_SLOT, Tier.HOST: Region.HOST_SLOT}
            arenas = {
                tier: Arena(
                    regions[tier], sizes.slab, ledger.budget.cap(tier), memory[tier],
                    expected_bytes=expected_bytes.get(tier, 0),
                )
                for tier in memory
            }  # fmt: skip
            for arena in arenas.values():
                self.memory.callback(arena.close)
            hint = "lower slot_bytes, store_bytes, fetch_slots or store_slots, or raise the budget"
            rings = Rings(
                self.slots(Region.STORE_SLOT, sizes.store_slots, sizes.store, hint=hint),
                self.slots(Region.FETCH_SLOT, sizes.fetch_slots, sizes.slot_bytes, hint=hint),
            )
        except BaseException:
            super().close()
            raise
        self._book = RecordBook()
        self._slots = Slots(ledger, arenas, self._book)
        self._shipping = Shipping(self.traffic, rings, ledger, device=device, dtype=dtype)
        manager = weakref.proxy(self)  # no cycle: memory of the device is free as soon as the call ends
        self._fetches = Fetches(
            self._book, self._slots, self.traffic, self._shipping, self.record,
            check_open=lambda: TierManager.check_open(manager),
        )  # fmt: skip
        self.memory.callback(self._leave_all)

    def __len__(self) -> int:
        """How many records there are."""
        return len(self._book)

    def __contains__(self, key: object) -> bool:
        return key in self._book

    def bank(self, centroids: Float[Tensor, "clusters width"], version: int = 0) -> CentroidBank:
        """Book `centroids` as what records may be decoded against. The caller is a holder and releases it in the end.

        Raises:
            ValueError: not of the manager's dtype and device, or closed.
            TierCapacityError: the device budget has no room for them.
        """
        self.check_open()
        check_rows("centroids", centroids, self.dtype, self.device)
        return CentroidBank(centroids, version, self.ledger)

    @spanned(Op.STORE)
    def store(
        self,
        keys: Sequence[RecordKey],
        rows: Float[Tensor, "rows width"],
        sizes: Sequence[int],
        *,
        codec: Codec | str,
        bank: CentroidBank | Sequence[CentroidBank] | None = None,
        clusters: Sequence[int] | None = None,
        tier: Tier = Tier.HOST,
    ) -> None:
        """Store `rows`, the first `sizes[0]` of them under `keys[0]` and so on. What was stored there is replaced.

        Args:
            keys: distinct names.
            rows: on the device, in the manager's dtype. They may still be being computed, and must not be written
                again before compute has encoded them (the order of the caller's stream sees to it).
            sizes: rows of each record.
            codec: how they are stored. One with `needs_base` takes `bank` and `clusters`, another neither.
            bank, clusters: centroids, and which of them each record is a delta against; one bank for all, or, since
                a bank stays until its last record is gone, one for each.
            tier: `HOST`; or `DEVICE`, for records that stay on the device, encoded.

        Raises:
            ValueError: arguments that do not fit each other, or a record larger than a staging slot. A row that is not
                finite raises nothing: in a code it comes back as NaN.
            TierCapacityError: no room. The records before the one that found none are stored, it and the rest are not.
        """
        self.check_open()
        check_rows("rows", rows, self.dtype, self.device)
        forms = checked_forms(keys, rows, sizes, codec=codec, bank=bank, clusters=clusters, tier=tier)
        bases: Sequence[DeltaBase | None] = [None] * len(keys)
        if bank is not None and clusters is not None:
            bases = [DeltaBase(*each) for each in zip(banks_of(bank, len(keys)), clusters, strict=True)]
        self.progress()
        first = [0, *accumulate(sizes)]
        # The records of one run share a staging slot, in which they take as much room as in the host tier.
        taken = [self._slots.staged_bytes(form.nbytes) for form in forms]
        if taken and max(taken) > self.slot_bytes:
            raise ValueError(f"a record takes {max(taken)} bytes; allowed are the {self.slot_bytes} of a staging slot")
        for run in runs(taken, self._run_bytes):
            part = keys[run], forms[run], bases[run], rows[first[run.start] : first[run.stop]], tier
            try:
                self._store(*part)
            except TierCapacityError:  # replaced records that are about to be read hold room
                if not self._fetches.land_all():
                    raise
                self._store(*part)

    @spanned(Op.FETCH)
    def fetch(
        self,
        keys: Sequence[RecordKey],
        out: Float[Tensor, "any width"] | None = None,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> Ticket:
        """Begin to bring records to the device. Copies set out at once, as far as there are staging slots.

        Args:
            keys: of records of one width.
            out, rows: where the answer goes, as for `Ticket.wait`, and is written as soon as it has arrived and others
                need its staging slots: until `wait` or `close` nothing else may touch these places. None: `wait` or
                `Ticket.into` says it.

        Raises:
            KeyError: nothing is stored under a key.
            ValueError: no keys, records of different widths, or `out` or `rows` does not fit; or closed.
        """
        self.check_open()
        self.progress()
        return self._fetches.begin(keys, [self._find(key) for key in keys], Destination(out, rows))

    def forget(self, keys: Iterable[RecordKey]) -> None:
        """Drop records. Fetches under way still get them.

        Raises:
            KeyError: nothing is stored under a key.
        """
        self.check_open()
        for key in keys:
            self._slots.leave(self._book.remove(key))

    def close_tickets(self) -> None:
        """Close every ticket that is open."""
        self._fetches.close_tickets()

    def progress(self) -> None:
        """Note which copies have ended, and send what waits for a staging slot. Never blocks."""
        self._fetches.send_waiting()

    def stats(self) -> TierStats:
        """What happened so far; a copy."""
        stats, host = super().stats(), self._slots.host_memory()
        stats.pinned_requested += host.held_bytes
        stats.pinned_actual += host.actual_bytes
        stats.pinned = stats.pinned or host.pinned
        return stats

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where books, tickets, slots and ledger contradict each other."""
        self._slots.check_integrity()
        self._fetches.check_integrity()
        super().check_integrity()

    def close(self) -> None:
        """Wait for the copies under way, then give everything back: open tickets, records, memory and threads. May be
        called again."""
        self._fetches.close_tickets()
        super().close()

    def check_open(self) -> None:
        """Raise `ValueError` once the tiers are closed, and `TransferError` in a forked process."""
        if os.getpid() != self._process:
            raise TransferError("the threads of a tier manager do not survive a fork: open tiers in this process")
        if self._closed:
            raise ValueError("this tier manager is closed")

    def _leave_all(self) -> None:
        for entry in list(self._book.entries()):
            self._slots.leave(entry)

    def _find(self, key: RecordKey) -> Entry:
        if key not in self._book:
            raise KeyError(f"nothing is stored as {key}")
        return self._book.find(key)

    def _store(
        self,
        keys: Sequence[RecordKey],
        forms: Sequence[RecordForm],
        bases: Sequence[DeltaBase | None],
        rows: Float[Tensor, "rows width"],
        tier: Tier,
    ) -> None:
        entries = [Entry(key, form, tier, base) for key, form, base in zip(keys, forms, bases, strict=True)]
        try:
            for entry in entries:
                if entry.base is not None:
                    entry.base.bank.hold()
            for entry in entries:
                self._slots.enter(entry)
            if tier is Tier.DEVICE:
                self._shipping.encode_on_device(entries, rows)
            else:
                self._shipping.send_down(entries, rows)
        except BaseException:
            for entry in entries:
                self._slots.leave(entry)
            raise
        for entry in entries:
            self._slots.leave(self._book.commit(entry))
        self.record(Stored(tier=tier, records=len(entries), nbytes=nbytes_of(entries)))
