"""The tier manager: stores rows as records, moves them between device, host and disk, and fetches them back.

    rows ──encode──▶ store slot ──STORE──▶ host slot ──SPILL──▶ disk slot
           compute    (device)              │    ▲                  │
    rows ◀─decode─── fetch slot ◀──FETCH────┘    └───────LOAD───────┘
           compute    (device)

Nothing here waits for a copy. What has to wait for what is in the fences of the slots (`Traffic`), so a slot is given
back as soon as its last job is submitted, and its next holder finds that job in its fence. One thread of the
caller uses a manager; copies run on the transport's streams and threads.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.errors import TierCapacityError
from tiered.core.events import Stored
from tiered.core.features import Tier
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.offload.codec_bytes import Codec
from tiered.tiers.arguments import check_rows, checked_forms
from tiered.tiers.banks import CentroidBank, DeltaBase, banks_of
from tiered.tiers.batches import Destination, runs
from tiered.tiers.lifetime import TierLifetime
from tiered.tiers.record_book import Entry, RecordForm, RecordKey, nbytes_of
from tiered.tiers.ticket import Ticket


class TierManager(TierLifetime):
    """Records of rows in three tiers under one budget; `open_tiers` makes one.

    `store` and `fetch` never wait for a copy. A fetch answers with what was stored when it was asked, whatever is
    stored under the same keys meanwhile; a delta is decoded against the centroids that it was made with.
    """

    def bank(self, centroids: Float[Tensor, "clusters width"], version: int = 0) -> CentroidBank:
        """Book `centroids` as what records may be decoded against. The caller is a holder and releases it in the end.

        Raises:
            ValueError: not of the manager's dtype and device, or closed.
            TierCapacityError: the device budget has no room for them.
        """
        self._fetches.check_open()
        check_rows("centroids", centroids, self.dtype, self.device)
        return CentroidBank(centroids, version, self._ledger)

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
            tier: `HOST`; or `DEVICE`, for records that stay on the device, encoded, until they are evicted.

        Raises:
            ValueError: arguments that do not fit each other, or a record larger than a staging slot. A row that is not
                finite raises nothing: in a code it comes back as NaN.
            TierCapacityError: no room. The records before the one that found none are stored, it and the rest are not.
        """
        self._fetches.check_open()
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
            except TierCapacityError:  # what is about to be read cannot be evicted
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
            RecordLostError: a record's bytes went with a copy that failed.
            ValueError: no keys, records of different widths, or `out` or `rows` does not fit; or closed.
        """
        self._fetches.check_open()
        self.progress()
        return self._fetches.begin(keys, [self._find(key) for key in keys], Destination(out, rows))

    def evict(self, keys: Iterable[RecordKey]) -> int:
        """Move records one tier down, from the highest tier that holds them. Returns how many moved: those that a
        fetch is about to read, and those that the disk alone holds, stay.

        Raises:
            KeyError, RecordLostError: as `fetch`.
            TierCapacityError: the tier below is full, or there is none.
        """
        self._fetches.check_open()
        self.progress()
        moved = 0
        for key in keys:
            entry = self._find(key)
            tier = next((tier for tier in (Tier.DEVICE, Tier.HOST) if tier in entry.slots), None)
            if tier is not None and not entry.readers:
                self._slots.move_down(entry, tier)
                moved += 1
        return moved

    def forget(self, keys: Iterable[RecordKey]) -> None:
        """Drop records. Fetches under way still get them.

        Raises:
            KeyError: nothing is stored under a key.
        """
        self._fetches.check_open()
        for key in keys:
            self._slots.leave(self._book.remove(key))

    def __enter__(self) -> "TierManager":
        return self

    def _store(
        self,
        keys: Sequence[RecordKey],
        forms: Sequence[RecordForm],
        bases: Sequence[DeltaBase | None],
        rows: Float[Tensor, "rows width"],
        tier: Tier,
    ) -> None:
        entries: list[Entry] = []
        for each in zip(keys, forms, bases, strict=True):
            self._versions += 1
            entries.append(Entry(each[0], each[1], self._versions, each[2]))
        try:
            for entry in entries:
                if entry.base is not None:
                    entry.base.bank.hold()
            for entry in entries:
                self._slots.enter(entry, tier)
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
        self._record(Stored(tier=tier, records=len(entries), nbytes=nbytes_of(entries)))
