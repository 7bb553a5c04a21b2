"""Books: which records there are, where their bytes lie, and what still needs them. No tensors.

An entry is one version of a record, and it never changes its content: storing a key again makes a new entry. The old
one stays until the last reader lets go, so a reader gets what was stored when it asked.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tiered.core.features import Feature, Tier
from tiered.offload.codec_bytes import Codec

if TYPE_CHECKING:
    from tiered.offload.arena import Slot
    from tiered.tiers.banks import DeltaBase


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


@dataclass(eq=False, slots=True)
class Entry:
    """One version of a record.

    Attributes:
        tier: where its bytes lie, device or host.
        base: what the record is decoded against; None if it stands alone.
        slot: holds the bytes; None before they have room and after they left it.
        readers: fetches that have not issued their copy yet.
    """

    key: RecordKey
    form: RecordForm
    tier: Tier
    base: "DeltaBase | None" = None
    slot: "Slot | None" = None
    readers: int = 0

    @property
    def memory(self) -> "Slot":
        """`slot`, of a record that has one."""
        assert self.slot is not None, "the record has room"
        return self.slot

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

    def __len__(self) -> int:
        return len(self._newest)

    def __contains__(self, key: object) -> bool:
        return key in self._newest

    def entries(self) -> Iterator[Entry]:
        """Every entry that holds a slot: the newest of each key, and older ones that still have readers."""
        yield from self._newest.values()
        yield from self._superseded.values()

    def find(self, key: RecordKey) -> Entry:
        """The newest entry of `key`.

        Raises:
            KeyError: nothing is stored under it.
        """
        return self._newest[key]

    def commit(self, entry: Entry) -> Entry | None:
        """Make an entry readable under its key. Returns the one that it replaces, unless that has readers: its slot is
        to be given back."""
        if entry.slot is None:
            raise ValueError(f"only an entry with a slot can be committed: {entry.key} has none")
        replaced = self.remove(entry.key) if entry.key in self._newest else None
        self._newest[entry.key] = entry
        return replaced

    def remove(self, key: RecordKey) -> Entry | None:
        """Forget `key`. Returns its entry where it has no readers: its slot is to be given back.

        Raises:
            KeyError: nothing is stored under it.
        """
        entry = self._newest.pop(key)
        if entry.readers:
            self._superseded[id(entry)] = entry
            return None
        return entry

    def begin_reading(self, entry: Entry) -> None:
        """A fetch will read `entry`, which keeps its slot until `end_reading`."""
        if entry.slot is None:
            raise ValueError(f"{entry.key} cannot be read: it has no slot")
        entry.readers += 1

    def end_reading(self, entry: Entry) -> bool:
        """A fetch has issued its copy, or given up. True where that was the last reader of a superseded entry: its
        slot is to be given back."""
        if entry.readers < 1:
            raise ValueError(f"{entry.key} has no reader to let go")
        entry.readers -= 1
        return entry.readers == 0 and self._superseded.pop(id(entry), None) is not None

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where the books contradict themselves."""
        for key, entry in self._newest.items():
            if entry.key != key:
                raise RuntimeError(f"{key} leads to {entry.key}")
        for entry in self._superseded.values():
            if not entry.readers:
                raise RuntimeError(f"superseded {entry.key} is kept without a reader")
        for entry in self.entries():
            if entry.readers < 0 or entry.slot is None:
                raise RuntimeError(f"{entry.key} has {entry.readers} readers and the slot {entry.slot}")
