"""The slab book against a model that keeps every record as an interval."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered.offload.slabs import Place, SlabBook

KIB, MIB = 1 << 10, 1 << 20


class SlabMachine(RuleBasedStateMachine):
    """`places` holds what is taken. Units of one byte, so that every kind of size class fits a small slab."""

    @initialize(slab_bytes=st.integers(1, 300), slabs=st.integers(0, 2))
    def open(self, slab_bytes: int, slabs: int):
        self.book = SlabBook(slab_bytes, unit=1)
        self.places: list[Place] = []
        self.released: list[Place] = []
        self.slabs = slabs
        if slabs:
            assert self.book.add_slabs(slabs) == 0

    def free_slots(self, room: int) -> list[int]:
        """Offsets of the free slots of a class, those of slabs in use first, each kind from the lowest."""
        size, used, empty = self.book.slab_bytes, [], []
        for slab in range(self.slabs):
            inside = [place for place in self.places if place.offset // size == slab]
            if all(place.room == room for place in inside):
                taken = {place.offset for place in inside}
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
        place = self.book.allocate(nbytes)
        assert (place and place.offset) == (expected[0] if expected else None)
        if place is not None:
            self.took(place, nbytes)

    def took(self, place: Place, nbytes: int):
        assert (place.nbytes, place.room) == (nbytes, self.book.room_for(nbytes))
        assert place.offset == place.slab * self.book.slab_bytes + place.index * place.room
        end = place.offset + place.room
        assert not [other for other in self.places if other.offset < end and place.offset < other.offset + other.room]
        self.places.append(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        place = data.draw(st.sampled_from(self.places))
        self.book.release(place)
        self.places.remove(place)
        self.released.append(place)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject):
        with pytest.raises(ValueError, match="released already"):
            self.book.release(data.draw(st.sampled_from(self.released)))

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def release_of_another_book(self, data: st.DataObject):
        with pytest.raises(ValueError, match="another book"):
            self.book.release(replace(data.draw(st.sampled_from(self.places))))

    @rule()
    def release_all(self):
        for place in self.places:
            self.book.release(place)
        self.released += self.places
        self.places = []
        assert self.book.free_bytes(self.book.slab_bytes) == self.slabs * self.book.slab_bytes

    @invariant()
    def books_agree(self):
        self.book.check_integrity()
        assert self.book.capacity_bytes == self.slabs * self.book.slab_bytes
        assert self.book.held_bytes == sum(place.room for place in self.places)
        assert self.book.requested_bytes == sum(place.nbytes for place in self.places)
        for nbytes in {
            1,
            self.book.slab_bytes // 2 or 1,
            self.book.slab_bytes,
            *(place.nbytes for place in self.places),
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
    places = [book.allocate(5000) for _ in range(10)]
    assert [place.offset for place in places if place] == list(range(0, 20 * 4096, 8192))


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
    place = book.allocate(8192)
    assert place is not None
    book._places[4096] = Place(0, 1, 4096, 4096, 4096)
    with pytest.raises(RuntimeError, match="overlaps what ends at 8192"):
        book.check_integrity()
