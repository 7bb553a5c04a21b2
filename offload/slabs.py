"""Books: which bytes of an arena or a file are taken. Integers only.

The address space is a row of slabs of equal size, numbered from 0. A slab is cut into slots of one size class; when the
last slot of a slab is released, the slab may be cut anew for another class. The free slots of a slab and the slabs with
room are bits of integers, and the lowest bit is taken first: records that are stored one after another lie one after
another, and what is stored later fills the gaps at low addresses.

An operation takes one step on an integer of a bit per slot of a slab, and one on an integer of a bit per slab.
Padding takes less than one unit of a record up to 64 units and at most 1/16 of a larger one, and less than one slot at
the end of a slab.
"""

from collections import Counter
from dataclasses import dataclass

UNIT = 4096  # bytes: a page, and the block of most file systems
EXACT_UNITS = 64  # up to here every number of units is a size class
STEPS = 16  # classes between a power of two and the next


def size_class(nbytes: int, unit: int = UNIT) -> int:
    """Bytes of the slot that a record of `nbytes` takes in a slab that has room for it."""
    units = -(-nbytes // unit)
    if units > EXACT_UNITS:
        step = (1 << units.bit_length() - 1) // STEPS
        units = -(-units // step) * step
    return units * unit


@dataclass(frozen=True, slots=True)
class BookedSlot:
    """The slot of one record. Two are neighbours when one begins where the other's room ends.

    Attributes:
        slab: number of the slab.
        index: number of the slot in its slab.
        offset: first byte in the address space.
        nbytes: bytes asked for.
        room: bytes of the slot, a size class.
    """

    slab: int
    index: int
    offset: int
    nbytes: int
    room: int


class SlabBook:
    """Slots by size class over slabs of `slab_bytes`. Begins without slabs; `add_slabs` makes room."""

    def __init__(self, slab_bytes: int, unit: int = UNIT) -> None:
        if unit < 1 or slab_bytes < unit or slab_bytes % unit:
            raise ValueError(f"slab_bytes = {slab_bytes} must be a positive multiple of {unit}")
        self.slab_bytes = slab_bytes
        self.unit = unit
        self.slabs = 0  # their number
        self.held_bytes = 0  # the room of all slots
        self.requested_bytes = 0  # what was asked for; the rest of the room is padding
        self._slots: dict[int, BookedSlot] = {}  # by offset
        self._empty = 0  # bit s: slab s serves no class
        self._class: dict[int, int] = {}  # slab in use → its class
        self._free: dict[int, int] = {}  # slab in use → bit i: slot i is free
        self._partial: Counter[int] = Counter()  # class → bit s: slab s is of it and has a free slot
        self._spare: Counter[int] = Counter()  # class → free slots of its slabs

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.slabs * self.slab_bytes

    def room_for(self, nbytes: int) -> int:
        """The size class of a record of `nbytes`.

        Raises:
            ValueError: `nbytes` is not positive, or above `slab_bytes`.
        """
        if not 0 < nbytes <= self.slab_bytes:
            raise ValueError(f"a record of {nbytes} bytes does not fit a slab: 1 to slab_bytes = {self.slab_bytes}")
        return min(size_class(nbytes, self.unit), self.slab_bytes)

    def slots_per_slab(self, nbytes: int) -> int:
        """Records of `nbytes` that one slab holds."""
        return self.slab_bytes // self.room_for(nbytes)

    def free_bytes(self, nbytes: int) -> int:
        """Free bytes in slots that a record of `nbytes` may take."""
        room = self.room_for(nbytes)
        return (self._empty.bit_count() * (self.slab_bytes // room) + self._spare[room]) * room

    def add_slabs(self, count: int) -> int:
        """Make room for `count` more slabs, numbered one after another; returns the number of the first.

        Raises:
            ValueError: `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"count = {count} slabs must be positive")
        first = self.slabs
        self.slabs += count
        self._empty |= (1 << count) - 1 << first
        return first

    def allocate(self, nbytes: int) -> BookedSlot | None:
        """The lowest free slot for a record of `nbytes`, in a slab of its class or else in an empty one; None if full.

        Raises:
            ValueError: `nbytes` is not positive, or above `slab_bytes`.
        """
        room = self.room_for(nbytes)
        slabs = self._partial[room] or self._empty
        if not slabs:
            return None
        slab = _lowest(slabs)
        return self._take(slab, _lowest(self._free[slab]) if slab in self._free else 0, room, nbytes)

    def release(self, slot: BookedSlot) -> None:
        """Give `slot` back, and its slab too when nothing else is in it.

        Raises:
            ValueError: released already, or a slot of another book.
        """
        if self._slots.get(slot.offset) is not slot:
            raise ValueError(f"{slot} was released already, or belongs to another book")
        del self._slots[slot.offset]
        slab, room = slot.slab, slot.room
        slots = self.slab_bytes // room
        self._free[slab] |= 1 << slot.index
        self._spare[room] += 1
        self._partial[room] |= 1 << slab
        if self._free[slab].bit_count() == slots:
            del self._class[slab], self._free[slab]
            self._spare[room] -= slots
            self._partial[room] ^= 1 << slab
            self._empty |= 1 << slab
        self.held_bytes -= room
        self.requested_bytes -= slot.nbytes

    def check_integrity(self) -> None:
        """Raise `RuntimeError` with the numbers if the books contradict themselves."""
        end = 0
        taken, spare, partial = Counter[int](), Counter[int](), Counter[int]()
        for offset, slot in sorted(self._slots.items()):
            inside = slot.index * slot.room + slot.slab * self.slab_bytes
            if offset < end or slot.offset != offset or offset != inside or self._class.get(slot.slab) != slot.room:
                raise RuntimeError(f"{slot} overlaps what ends at {end}, or is not in a slab of its class")
            end = offset + slot.room
            taken[slot.slab] |= 1 << slot.index
        held = self._slots.values()
        sums = sum(slot.room for slot in held), sum(slot.nbytes for slot in held)
        if (self.held_bytes, self.requested_bytes) != sums:
            raise RuntimeError(f"held {self.held_bytes} and requested {self.requested_bytes} bytes, the slots {sums}")
        for slab, room in self._class.items():
            slots = self.slab_bytes // room
            if self._free[slab] ^ taken[slab] != (1 << slots) - 1 or not taken[slab]:
                raise RuntimeError(f"slab {slab} of class {room}: taken {taken[slab]:b}, free {self._free[slab]:b}")
            spare[room] += self._free[slab].bit_count()
            partial[room] |= bool(self._free[slab]) << slab
        empty = sum(1 << slab for slab in range(self.slabs) if slab not in self._class)
        if (self._empty, self._spare, self._partial) != (empty, spare, partial):
            kept = f"empty {self._empty:b}, spare {self._spare}, partly filled {self._partial}"
            raise RuntimeError(f"{kept}; counted: {empty:b}, {spare}, {partial}")

    def _take(self, slab: int, index: int, room: int, nbytes: int) -> BookedSlot:
        if slab not in self._class:
            slots = self.slab_bytes // room
            self._empty ^= 1 << slab
            self._class[slab] = room
            self._free[slab] = (1 << slots) - 1
            self._spare[room] += slots
            self._partial[room] |= 1 << slab
        self._free[slab] ^= 1 << index
        self._spare[room] -= 1
        if not self._free[slab]:
            self._partial[room] ^= 1 << slab
        slot = BookedSlot(slab, index, slab * self.slab_bytes + index * room, nbytes, room)
        self._slots[slot.offset] = slot
        self.held_bytes += room
        self.requested_bytes += nbytes
        return slot


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
