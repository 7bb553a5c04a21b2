"""Books: which records there are, in which tiers their bytes lie, and what still needs them. No tensors.

An entry is one version of a record, and it never changes its content: storing a key again makes a new entry. The old
one stays until the last reader lets go, so a reader gets what was stored when it asked.

    RESERVED ──commit──▶ STORED ──evict──▶ (other tier, or gone)
       │                   │
       └──abandon          └──lose──▶ LOST       its copy failed: readers get an error, and it can be stored again
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tiered.core.errors import RecordLostError
from tiered.core.features import Feature, Tier
from tiered.offload.codec_bytes import Codec

if TYPE_CHECKING:
    from tiered.offload.arena import Slot
    from tiered.offload.spill_file import DiskSlot


class RecordKey(NamedTuple):
    """The name of a record: the unit that moves between tiers.

    Attributes:
        feature: what is stored of the rows.
        layer: of the model.
        sequence: of the batch.
        part: number of the cluster, piece of a cluster, or span that the record holds in this layer and sequence.
    """

    feature: Feature
    layer: int
    sequence: int
    part: int

    def __str__(self) -> str:
        return f"{self.feature} of layer {self.layer}, sequence {self.sequence}, part {self.part}"


@dataclass(frozen=True, slots=True)
class RecordForm:
    """How a record's bytes are to be read.

    Attributes:
        codec: how the rows are stored.
        rows: number of rows.
        width: elements of a row.
        element_bytes: bytes of an element in the model's dtype.
    """

    codec: Codec
    rows: int
    width: int
    element_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the record, scales included."""
        return self.rows * self.codec.row_bytes(self.width, self.element_bytes)


class EntryState(StrEnum):
    """Where an entry is in its life."""

    RESERVED = "reserved"  # has slots, not yet readable
    STORED = "stored"  # readable, once the copies that its fences name have ended
    LOST = "lost"  # no tier holds its bytes


@dataclass(eq=False, slots=True)
class Entry:
    """One version of a record.

    Attributes:
        base: what the record is decoded against; None where it stands alone.
        slots: by tier, what holds the bytes there.
        readers: fetches that have not issued their copy yet; an entry with readers is not evicted.
        used: number of the last store or fetch, for eviction by age.
    """

    key: RecordKey
    form: RecordForm
    version: int
    base: "DeltaBase | None" = None
    state: EntryState = EntryState.RESERVED
    slots: "dict[Tier, Slot | DiskSlot]" = field(default_factory=dict)
    readers: int = 0
    used: int = 0

    @property
    def clean(self) -> bool:
        """Whether the disk has its bytes as well, so that dropping them elsewhere costs no copy."""
        return Tier.DISK in self.slots

    def check_there(self) -> None:
        """Raise RecordLostError where no tier holds the bytes."""
        if self.state is EntryState.LOST:
            raise RecordLostError(f"{self.key} is lost: a copy of it failed; store it again")

    def let_go_of_base(self) -> None:
        """It will not be decoded any more, but by those that hold the base themselves."""
        if self.base is not None:
            self.base.bank.release()
            self.base = None


def nbytes_of(entries: Iterable[Entry]) -> int:
    """Bytes of the records, once each."""
    return sum(entry.form.nbytes for entry in entries)


class RecordBook:
    """All entries by key."""

    def __init__(self) -> None:
        self._newest: dict[RecordKey, Entry] = {}
        self._superseded: dict[int, Entry] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._newest)

    def __contains__(self, key: object) -> bool:
        return key in self._newest

    def entries(self) -> Iterator[Entry]:
        """Every entry that holds slots: the newest of each key, and older ones that still have readers."""
        yield from self._newest.values()
        yield from self._superseded.values()

    def find(self, key: RecordKey) -> Entry:
        """The newest entry of `key`.

        Raises:
            KeyError: nothing is stored under it.
        """
        return self._newest[key]

    def commit(self, entry: Entry) -> Entry | None:
        """Make a reserved entry readable under its key. Returns the one that it replaces, unless that has
        readers: its slots are to be given back."""
        if entry.state is not EntryState.RESERVED or not entry.slots:
            raise ValueError(f"only a reserved entry with a slot can be committed: {entry.key} is {entry.state}")
        entry.state = EntryState.STORED
        replaced = self.remove(entry.key) if entry.key in self._newest else None
        self._newest[entry.key] = entry
        self._used(entry)
        return replaced

    def remove(self, key: RecordKey) -> Entry | None:
        """Forget `key`. Returns its entry where it has no readers: its slots are to be given back.

        Raises:
            KeyError: nothing is stored under it.
        """
        entry = self._newest.pop(key)
        if entry.readers:
            self._superseded[id(entry)] = entry
            return None
        return entry

    def begin_reading(self, entry: Entry) -> None:
        """A fetch will read `entry`; it is not evicted before `end_reading`."""
        if entry.state is not EntryState.STORED:
            raise ValueError(f"{entry.key} cannot be read: it is {entry.state}")
        entry.readers += 1
        self._used(entry)

    def end_reading(self, entry: Entry) -> bool:
        """A fetch has issued its copy, or given up. True where that was the last reader of a superseded entry: its
        slots are to be given back."""
        if entry.readers < 1:
            raise ValueError(f"{entry.key} has no reader to let go")
        entry.readers -= 1
        return entry.readers == 0 and self._superseded.pop(id(entry), None) is not None

    def put(self, entry: Entry, tier: Tier, slot: "Slot | DiskSlot") -> None:
        """`entry` has bytes in `slot` of `tier` now."""
        if tier in entry.slots:
            raise ValueError(f"{entry.key} already has a slot in the {tier} tier")
        entry.slots[tier] = slot

    def leavers(self, tier: Tier) -> list[Entry]:
        """The entries that may leave `tier`, first to go first: those without readers; clean before dirty, since they
        go without a copy; then the longest unused."""
        candidates = [
            entry
            for entry in self.entries()
            if entry.state is EntryState.STORED and tier in entry.slots and not entry.readers
        ]
        return sorted(candidates, key=lambda entry: (not entry.clean, entry.used))

    def lose(self, entry: Entry) -> None:
        """A copy of `entry` failed and no tier holds its bytes."""
        if entry.slots:
            raise ValueError(f"{entry.key} is not lost: it has bytes in {', '.join(entry.slots)}")
        entry.state = EntryState.LOST

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where the books contradict themselves."""
        for key, entry in self._newest.items():
            if entry.key != key or entry.state is EntryState.RESERVED:
                raise RuntimeError(f"{key} leads to {entry.key}, {entry.state}")
        for entry in self._superseded.values():
            if not entry.readers:
                raise RuntimeError(f"superseded {entry.key} is kept without a reader")
        for entry in self.entries():
            if entry.readers < 0 or (entry.state is EntryState.STORED) != bool(entry.slots):
                raise RuntimeError(f"{entry.key} is {entry.state} with {entry.readers} readers in {list(entry.slots)}")

    def _used(self, entry: Entry) -> None:
        self._clock += 1
        entry.used = self._clock
