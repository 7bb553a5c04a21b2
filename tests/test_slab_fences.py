"""Fences over slots that come and go, against a model that knows what is under way on every byte."""

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered.offload.errors import TransferError
from tiered.offload.fence import Fence, Region, SlabFences
from tiered.offload.slabs import BookedSlot, SlabBook


class Access:
    """An event that ends when a test says so."""

    def __init__(self):
        self.ended = False

    def done(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        raise TransferError("it failed")


class FenceMachine(RuleBasedStateMachine):
    """`under_way[b]` holds every access to byte b since the last write, which waited for all before it."""

    @initialize()
    def open(self):
        self.book = SlabBook(12, unit=1)
        self.book.add_slabs(2)
        self.fences = SlabFences(Region.HOST_SLOT)
        self.users: list[tuple[BookedSlot, Fence]] = []
        self.under_way: defaultdict[int, set[Access]] = defaultdict(set)
        self.accesses: list[Access] = []
        self.touched: dict[Access, BookedSlot] = {}

    def on(self, slot: BookedSlot) -> set[Access]:
        bytes_of_it = range(slot.offset, slot.offset + slot.room)
        return {access for byte in bytes_of_it for access in self.under_way[byte] if not access.ended}

    @rule(nbytes=st.sampled_from([2, 3, 4, 5, 6, 12]))
    def take(self, nbytes: int):
        if slot := self.book.allocate(nbytes):
            fence = self.fences.fence(slot)
            assert fence.region == Region.HOST_SLOT
            told = {event for event in fence.before_write() if not event.done()}
            assert told >= self.on(slot)
            assert told <= {access for access, other in self.touched.items() if other.slab == slot.slab}
            self.users.append((slot, fence))

    @precondition(lambda self: self.users)
    @rule(data=st.data(), writes=st.booleans())
    def access(self, data: st.DataObject, writes: bool):
        slot, fence = data.draw(st.sampled_from(self.users))
        access = Access()
        self.accesses.append(access)
        self.touched[access] = slot
        for byte in range(slot.offset, slot.offset + slot.room):
            if writes:
                self.under_way[byte].clear()
            self.under_way[byte].add(access)
        (fence.writes if writes else fence.reads)(access)

    @precondition(lambda self: self.accesses)
    @rule(data=st.data())
    def end(self, data: st.DataObject):
        access = data.draw(st.sampled_from(self.accesses))
        access.ended = True
        self.accesses.remove(access)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        user = data.draw(st.sampled_from(self.users))
        self.users.remove(user)
        self.book.release(user[0])

    @invariant()
    def nothing_under_way_is_forgotten(self):
        known = {event for fence in self.fences.unfinished() for event in fence.before_write()}
        assert known >= {access for there in self.under_way.values() for access in there if not access.ended}


TestFences = FenceMachine.TestCase
TestFences.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize("ended", [True, False])
def test_a_failure_that_is_over_is_no_business_of_the_next_user(ended: bool):
    book, fences = SlabBook(4096), SlabFences(Region.DISK_SLOT)
    book.add_slabs(1)
    failed, seen = Access(), ()
    for _ in range(2):
        slot = book.allocate(100)
        assert slot is not None
        fence = fences.fence(slot)
        seen = fence.before_write()
        fence.writes(failed)
        failed.ended = ended
        book.release(slot)
    assert seen == (() if ended else (failed,))


def test_a_slot_waits_for_those_alone_whose_bytes_it_takes():
    book, fences = SlabBook(4 * 4096), SlabFences(Region.DISK_SLOT)
    book.add_slabs(1)
    small = [book.allocate(4096) for _ in range(4)]
    reads = [Access() for _ in range(4)]
    for slot, read in zip(small, reads, strict=True):
        assert slot is not None
        fences.fence(slot).reads(read)
        book.release(slot)
    large = [book.allocate(8192) for _ in range(2)]
    assert [fences.fence(slot).before_write() for slot in large if slot] == [tuple(reads[:2]), tuple(reads[2:])]
