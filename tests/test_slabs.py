"""The slab book against a model that keeps every record as an interval."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered.offload.slabs import BookedSlot, SlabBook

KIB, MIB = 1 << 10, 1 << 20


class SlabMachine(RuleBasedStateMachine):
    """`slots` holds what is taken. Units of one byte, so that every kind of size class fits a small slab."""

    @initialize(slab_bytes=st.integers(1, 300), slabs=st.integers(0, 2))
    def open(self, slab_bytes: int, slabs: int):
        self.book = SlabBook(slab_bytes, unit=1)
        self.slots: list[BookedSlot] = []
        self.released: list[BookedSlot] = []
        self.slabs = slabs
        if slabs:
            assert self.book.add_slabs(slabs) == 0

    def free_slots(self, room: int) -> list[int]:
        """Offsets of the free slots of a class, those of slabs in use first, each kind from the lowest."""
        size, used, empty = self.book.slab_bytes, [], []
        for slab in range(self.slabs):
            inside = [slot for slot in self.slots if slot.offset // size == slab]
            if all(slot.room == room for slot in inside):
                taken = {slot.offset for slot in inside}
                offsets = range(slab * size, slab * size + size // room * room, room)
                (used if inside else empty).extend(offset for offset in offsets if offset not in taken)
        return used + empty

    @precondition(lambda self: self.slabs < 6)
    @rule(count=st.integers(1, 2))
    def add_slabs(self, count: int):
        assert self.book.add_slabs(count) == self.slabs
        self.slabs += count

    @rule(data=st.data(), tight=st.booleans())
    def allocate(self, data: st.DataObject, tight: bool):
        # Few sizes, so that slots are shared and slabs are left.
        sizes = st.sampled_from(sorted({1, self.book.slab_bytes // 3 or 1, self.book.slab_bytes}))
        nbytes = data.draw(sizes if tight else st.integers(1, self.book.slab_bytes))
        expected = self.free_slots(self.book.room_for(nbytes))
        slot = self.book.allocate(nbytes)
        assert (slot and slot.offset) == (expected[0] if expected else None)
        if slot is not None:
            self.took(slot, nbytes)

    def took(self, slot: BookedSlot, nbytes: int):
        assert (slot.nbytes, slot.room) == (nbytes, self.book.room_for(nbytes))
        assert slot.offset == slot.slab * self.book.slab_bytes + slot.index * slot.room
        end = slot.offset + slot.room
        assert not [other for other in self.slots if other.offset < end and slot.offset < other.offset + other.room]
        self.slots.append(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        slot = data.draw(st.sampled_from(self.slots))
        self.book.release(slot)
        self.slots.remove(slot)
        self.released.append(slot)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject):
        with pytest.raises(ValueError, match="released already"):
            self.book.release(data.draw(st.sampled_from(self.released)))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release_of_another_book(self, data: st.DataObject):
        with pytest.raises(ValueError, match="another book"):
            self.book.release(replace(data.draw(st.sampled_from(self.slots))))

    @rule()
    def release_all(self):
        for slot in self.slots:
            self.book.release(slot)
        self.released += self.slots
        self.slots = []
        assert self.book.free_bytes(self.book.slab_bytes) == self.slabs * self.book.slab_bytes

    @invariant()
    def books_agree(self):
        self.book.check_integrity()
        assert self.book.capacity_bytes == self.slabs * self.book.slab_bytes
        assert self.book.held_bytes == sum(slot.room for slot in self.slots)
        assert self.book.requested_bytes == sum(slot.nbytes for slot in self.slots)
        for nbytes in {
            1,
            self.book.slab_bytes // 2 or 1,
            self.book.slab_bytes,
            *(slot.nbytes for slot in self.slots),
        }:
            room = self.book.room_for(nbytes)
            assert self.book.free_bytes(nbytes) == len(self.free_slots(room)) * room


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = settings(max_examples=120, stateful_step_count=40)


@pytest.mark.parametrize(
    ("nbytes", "room"),
    [
        (1, 4 * KIB),
        (4 * KIB, 4 * KIB),
        (4 * KIB + 1, 8 * KIB),
        (147588, 148 * KIB),  # 64 rows of LLaDA-8B as deltas
        (255 * KIB, 256 * KIB),
        (256 * KIB, 256 * KIB),
        (256 * KIB + 1, 272 * KIB),  # from here in sixteenths
        (512 * KIB, 512 * KIB),
        (512 * KIB + 1, 544 * KIB),
        (4 * MIB - 1, 4 * MIB),
    ],
)
def test_size_classes(nbytes: int, room: int):
    assert SlabBook(4 * MIB).room_for(nbytes) == room


@given(st.integers(1, 64 * MIB))
def test_padding_is_bounded(nbytes: int):
    book = SlabBook(64 * MIB)
    room = book.room_for(nbytes)
    assert room % 4096 == 0
    assert 0 <= room - nbytes < (4096 if nbytes <= 256 * KIB else nbytes / 16 + 4096)
    assert book.room_for(room) == room
    assert book.room_for(min(nbytes + 1, 64 * MIB)) >= room


def test_a_class_never_exceeds_the_slab():
    book = SlabBook(65 * 4096)  # the class above 64 units has 68
    assert book.room_for(65 * 4096) == 65 * 4096
    assert book.slots_per_slab(65 * 4096) == 1


def test_records_stored_one_after_another_are_neighbours():
    book = SlabBook(10 * 4096)
    book.add_slabs(2)
    slots = [book.allocate(5000) for _ in range(10)]
    assert [slot.offset for slot in slots if slot] == list(range(0, 20 * 4096, 8192))


@pytest.mark.parametrize("nbytes", [-1, 0, 8193])
def test_sizes_that_fit_no_slab(nbytes: int):
    book = SlabBook(8192)
    for verb in (book.allocate, book.room_for, book.free_bytes, book.slots_per_slab):
        with pytest.raises(ValueError, match=f"record of {nbytes} bytes .* slab_bytes = 8192"):
            verb(nbytes)


@pytest.mark.parametrize("slab_bytes", [0, -4096, 4095, 4097])
def test_slabs_are_whole_units(slab_bytes: int):
    with pytest.raises(ValueError, match=f"slab_bytes = {slab_bytes} must be a positive multiple of 4096"):
        SlabBook(slab_bytes)


def test_a_count_of_slabs_is_positive():
    with pytest.raises(ValueError, match="count = 0"):
        SlabBook(4096).add_slabs(0)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("held_bytes", 8192), ("requested_bytes", 1), ("_empty", 0b11), ("_spare", {}), ("_free", {0: 0b111})],
)
def test_damaged_books_are_found(attribute: str, value: object):
    book = SlabBook(3 * 4096)
    book.add_slabs(2)
    book.allocate(4000)
    book.check_integrity()
    setattr(book, attribute, value)
    with pytest.raises(RuntimeError):
        book.check_integrity()


def test_an_overlap_is_found():
    book = SlabBook(3 * 4096)
    book.add_slabs(1)
    slot = book.allocate(8192)
    assert slot is not None
    book._slots[4096] = BookedSlot(0, 1, 4096, 4096, 4096)
    with pytest.raises(RuntimeError, match="overlaps what ends at 8192"):
        book.check_integrity()
