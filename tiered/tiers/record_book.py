"""Books: which records there are, in which tiers their bytes lie, and who still needs them. No tensors.

An entry is one version of a record, and it never changes its content: storing a key again makes a new entry. The old
one stays until the last reader lets go, so a reader gets what was stored when it asked.

    reserve ──commit──▶ STORED ──evict──▶ (other tier, or gone)
       │                  │
       └──abandon         └──lose──▶ LOST        its copy failed: readers get an error, and it can be stored again
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tiered.core.features import Tier
from tiered.tiers.record import RecordForm, RecordKey


class EntryState(StrEnum):
    """Where an entry is in its life."""

    RESERVED = "reserved"  # has room, not yet readable
    STORED = "stored"  # readable, once the copies that its fences name have ended
    LOST = "lost"  # no tier holds its bytes


@dataclass(eq=False, slots=True)
class Entry:
    """One version of a record.

    Attributes:
        base: what the record is decoded against; None where it stands alone.
        places: by tier, the room that holds the bytes there (an arena's or a file's slot).
        readers: fetches that have not issued their copy yet; an entry with readers is not evicted.
        drift: how far the record has moved, as its policy scored it last; low drift is evicted first.
        used: number of the last store, fetch or touch, for eviction by age.
    """

    key: RecordKey
    form: RecordForm
    version: int
    base: Any = None
    state: EntryState = EntryState.RESERVED
    places: dict[Tier, Any] = field(default_factory=dict)
    readers: int = 0
    drift: float = 0.0
    used: int = 0

    @property
    def clean(self) -> bool:
        """Whether the disk has its bytes as well, so that dropping them elsewhere costs no copy."""
        return Tier.DISK in self.places


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
        """Every entry that holds room: the newest of each key, and older ones that still have readers."""
        yield from self._newest.values()
        yield from self._superseded.values()

    def find(self, key: RecordKey) -> Entry:
        """The newest entry of `key`.

        Raises:
            KeyError: nothing is stored under it.
        """
        return self._newest[key]

    def commit(self, entry: Entry) -> Entry | None:
        """Make a reserved entry readable under its key. Returns the one it replaces where nobody reads that: its
        room is to be given back."""
        if entry.state is not EntryState.RESERVED or not entry.places:
            raise ValueError(f"only a reserved entry with room can be committed: {entry.key} is {entry.state}")
        entry.state = EntryState.STORED
        replaced = self.remove(entry.key) if entry.key in self._newest else None
        self._newest[entry.key] = entry
        self._touch(entry)
        return replaced

    def remove(self, key: RecordKey) -> Entry | None:
        """Forget `key`. Returns its entry where nobody reads it: its room is to be given back.

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
        self._touch(entry)

    def end_reading(self, entry: Entry) -> bool:
        """A fetch has issued its copy, or given up. True where that was the last reader of a superseded entry: its
        room is to be given back."""
        if entry.readers < 1:
            raise ValueError(f"{entry.key} has no reader to let go")
        entry.readers -= 1
        return entry.readers == 0 and self._superseded.pop(id(entry), None) is not None

    def place(self, entry: Entry, tier: Tier, room: Any) -> None:
        """`entry` has bytes in `tier` now."""
        if tier in entry.places:
            raise ValueError(f"{entry.key} already has room in the {tier} tier")
        entry.places[tier] = room

    def displace(self, entry: Entry, tier: Tier) -> Any:
        """`entry` has no bytes in `tier` any more. Returns the room.

        Raises:
            KeyError: it has none there.
        """
        return entry.places.pop(tier)

    def lose(self, entry: Entry) -> None:
        """A copy of `entry` failed and no tier holds its bytes."""
        if entry.places:
            raise ValueError(f"{entry.key} is not lost: it has bytes in {', '.join(entry.places)}")
        entry.state = EntryState.LOST

    def touch(self, key: RecordKey, drift: float) -> None:
        """Note that `key` was looked at, and how far it has drifted.

        Raises:
            KeyError: nothing is stored under it.
        """
        entry = self._newest[key]
        entry.drift = drift
        self._touch(entry)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where the books contradict themselves."""
        for key, entry in self._newest.items():
            if entry.key != key or entry.state is EntryState.RESERVED:
                raise RuntimeError(f"{key} leads to {entry.key}, {entry.state}")
        for entry in self._superseded.values():
            if not entry.readers:
                raise RuntimeError(f"superseded {entry.key} is kept without a reader")
        for entry in self.entries():
            if entry.readers < 0 or (entry.state is EntryState.STORED) != bool(entry.places):
                raise RuntimeError(f"{entry.key} is {entry.state} with {entry.readers} readers in {list(entry.places)}")

    def _touch(self, entry: Entry) -> None:
        self._clock += 1
        entry.used = self._clock
