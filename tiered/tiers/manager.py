"""The tier manager: stores rows as records, moves them between device, host and disk, and fetches them back.

    rows ──encode──▶ store slot ──STORE──▶ host slot ──SPILL──▶ disk slot
           compute    (device)              │    ▲                  │
    rows ◀─decode─── fetch slot ◀──FETCH────┘    └───────LOAD───────┘
           compute    (device)

Nothing here waits for a copy. What has to wait for what is in the fences of the slots (`Traffic`), so a slot is given
back as soon as its last job is submitted, and whoever takes it next finds that job in its fence. One thread of the
caller uses a manager; copies run on the transport's streams and threads.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.core.events import Stored
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.offload.codec_bytes import Codec
from tiered.offload.errors import TransferError
from tiered.tiers.arguments import banks_of, check_rows, checked_forms
from tiered.tiers.banks import Base, CentroidBank
from tiered.tiers.batches import runs
from tiered.tiers.fetches import Fetches, check_there
from tiered.tiers.journal import Journal
from tiered.tiers.placement import Placement
from tiered.tiers.record import RecordKey
from tiered.tiers.record_book import Entry, RecordBook, nbytes_of
from tiered.tiers.rooms import Rooms
from tiered.tiers.shipping import Shipping
from tiered.tiers.stats import TierStats
from tiered.tiers.ticket import Ticket
from tiered.tiers.traffic import Traffic


class TierManager:
    """Records of rows in three tiers under one budget; `open_tiers` makes one.

    `store` and `fetch` never wait for a copy. A fetch answers with what was stored when it was asked, whatever is
    stored under the same keys meanwhile; a delta is decoded against the centroids that it was made with.

    Attributes:
        device: where rows come from and go to.
        dtype: of the rows.
        slot_bytes: of a staging slot: no record may be larger.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        slot_bytes: int,
        ledger: Ledger,
        book: RecordBook,
        rooms: Rooms,
        traffic: Traffic,
        placement: Placement,
        shipping: Shipping,
        fetches: Fetches,
        journal: Journal,
        on_close: Callable[[], None],
    ) -> None:
        """The parts, which belong to this manager from now on; `on_close` gives back what lies below them."""
        self.device = device
        self.dtype = dtype
        self.slot_bytes = slot_bytes
        self._ledger = ledger
        self._book = book
        self._rooms = rooms
        self._traffic = traffic
        self._placement = placement
        self._shipping = shipping
        self._fetches = fetches
        self._journal = journal
        self._on_close = on_close
        self._versions = 0
        self._process = os.getpid()
        self._closed = False

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
        self._check_open()
        check_rows("centroids", centroids, self.dtype, self.device)
        return CentroidBank(centroids, version, self._ledger)

    def reserve(self, tier: Tier, nbytes: int) -> None:
        """Obtain the memory for `nbytes` of records in `tier` (`DEVICE` or `HOST`) now, so that no store waits for it.

        Raises:
            TierCapacityError: over the budget, or the system refuses it.
        """
        self._check_open()
        self._rooms.reserve(tier, nbytes)

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
            codec: how they are stored. `nvfp4_delta` needs `bank` and `clusters`, the others take neither.
            bank, clusters: centroids, and which of them each record is a delta against; one bank for all, or, since
                a bank stays until its last record is gone, one for each.
            tier: `HOST`; or `DEVICE`, for records that stay on the device, encoded, until they are evicted.

        Raises:
            ValueError: arguments that do not fit each other, a record larger than a staging slot, or values that are
                not finite (looked for on the CPU alone: on CUDA that would stall the stream).
            TierCapacityError: no room. The records before the one that found none are stored, it and the rest are not.
        """
        self._check_open()
        check_rows("rows", rows, self.dtype, self.device)
        forms = checked_forms(keys, rows, sizes, codec=codec, bank=bank, clusters=clusters, tier=tier)
        banks = None if bank is None else banks_of(bank, len(keys))
        self.progress()
        first = [0, *accumulate(sizes)]
        # The records of one run share a staging slot, in which they take as much room as in the host tier.
        for run in runs([self._rooms.size(tier, form.nbytes) for form in forms], self.slot_bytes):
            entries: list[Entry] = []
            for number in range(run.start, run.stop):
                base = None if banks is None or clusters is None else Base(banks[number], clusters[number])
                self._versions += 1
                entries.append(Entry(keys[number], forms[number], self._versions, base))
            self._store(entries, rows[first[run.start] : first[run.stop]], tier)

    @spanned(Op.FETCH)
    def fetch(self, keys: Sequence[RecordKey], *, paged: bool = False) -> Ticket:
        """Begin to bring records to the device. Copies set out at once, as far as there are staging slots. `paged`:
        through the ring for pages of features (`open_tiers(page_slots=…)`), so that neither waits for the other.

        Raises:
            KeyError: nothing is stored under a key.
            RecordLostError: a record's bytes went with a copy that failed.
            ValueError: no keys, or records of different widths; or closed.
        """
        self._check_open()
        self.progress()
        entries = [self._find(key) for key in keys]
        return self._fetches.begin(keys, entries, self._check_open, paged=paged)

    def evict(self, keys: Iterable[RecordKey]) -> int:
        """Move records one tier down, from the highest tier that holds them. Returns how many moved: those that a
        fetch is about to read, and those that the disk alone holds, stay.

        Raises:
            KeyError, RecordLostError: as `fetch`.
            TierCapacityError: the tier below is full, or there is none.
        """
        self._check_open()
        self.progress()
        moved = 0
        for key in keys:
            entry = self._find(key)
            tier = next((tier for tier in (Tier.DEVICE, Tier.HOST) if tier in entry.places), None)
            if tier is not None and not entry.readers:
                self._placement.move_down(entry, tier)
                moved += 1
        return moved

    def forget(self, keys: Iterable[RecordKey]) -> None:
        """Drop records. Fetches under way still get them.

        Raises:
            KeyError: nothing is stored under a key.
        """
        self._check_open()
        for key in keys:
            self._placement.leave(self._book.remove(key))

    def touch(self, key: RecordKey, drift: float) -> None:
        """Tell how far a record has drifted: those that drift least are evicted first.

        Raises:
            KeyError: nothing is stored under it.
        """
        self._book.touch(key, drift)

    def progress(self) -> None:
        """Note which copies have ended, and send what waits for a staging slot. Never blocks."""
        self._fetches.send_waiting()

    def synchronize(self) -> None:
        """Block the host until every copy so far has ended."""
        self._traffic.synchronize()

    def stats(self) -> TierStats:
        """What happened so far; a copy."""
        self.progress()
        return self._journal.stats(self._rooms.pinned())

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where books, tickets, rooms and ledger contradict each other."""
        self._book.check_integrity()
        held: Counter[Tier] = Counter()
        readers = self._fetches.readers()
        for entry in self._book.entries():
            for tier in entry.places:
                held[tier] += entry.form.nbytes
            if entry.readers != readers[id(entry)]:
                raise RuntimeError(f"{entry.key} has {entry.readers} readers, open tickets {readers[id(entry)]}")
        self._rooms.check_integrity(held)
        self._shipping.check_integrity()

    def close(self) -> None:
        """Wait for the copies under way, then give everything back: open tickets, records, memory, file and threads.
        May be called again."""
        if self._closed:
            return
        self._closed = True
        self._fetches.close()
        self._traffic.synchronize()
        for entry in list(self._book.entries()):
            self._placement.leave(entry)
        self._on_close()

    def __enter__(self) -> "TierManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store(self, entries: Sequence[Entry], rows: Float[Tensor, "rows width"], tier: Tier) -> None:
        try:
            for entry in entries:
                if entry.base is not None:
                    entry.base.bank.hold()
            for entry in entries:
                self._placement.enter(entry, tier)
            if tier is Tier.DEVICE:
                self._shipping.encode_on_device(entries, rows)
            else:
                self._shipping.send_down(entries, rows)
        except BaseException:
            for entry in entries:
                self._placement.leave(entry)
            raise
        for entry in entries:
            self._placement.leave(self._book.commit(entry))
        self._journal.add(Stored(tier=tier, records=len(entries), nbytes=nbytes_of(entries)))

    def _find(self, key: RecordKey) -> Entry:
        if key not in self._book:
            raise KeyError(f"nothing is stored as {key}")
        entry = self._book.find(key)
        check_there(entry)
        return entry

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise TransferError("the threads of a tier manager do not survive a fork: open tiers in this process")
        if self._closed:
            raise ValueError("this tier manager is closed")
