"""A ring against a model, and its slots against events that a test ends when it likes."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered.offload.errors import TransferError
from tiered.offload.fence import Region
from tiered.offload.ring import Ring, RingSlot

SLOT_BYTES = 16


class Switch:
    """An event that is over when a test says so."""

    def __init__(self) -> None:
        self.over = False
        self.failed = False

    def done(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        assert self.over, "nobody would ever end this wait"
        if self.failed:
            raise TransferError("the switch failed")


def ring_of(slots: int) -> Ring:
    return Ring(slots, torch.zeros(slots * SLOT_BYTES, dtype=torch.uint8), Region.FETCH_SLOT)


def idle(ring: Ring) -> bool:
    """True if no copy and no reader is under way in any slot."""
    return all(event.done() for fence in ring._fences for event in fence.before_write())


def acquired(ring: Ring) -> RingSlot:
    slot = ring.acquire()
    assert slot is not None
    return slot


class RingMachine(RuleBasedStateMachine):
    """Slots are acquired, written, read and released in any order, while their events end in any order."""

    @initialize(slots=st.integers(1, 4))
    def begin(self, slots: int) -> None:
        self.ring = ring_of(slots)
        self.held: list[RingSlot] = []
        self.released: list[RingSlot] = []
        self.writes: dict[RingSlot, Switch] = {}
        self.reads: dict[RingSlot, list[Switch]] = {}
        self.unfinished: dict[int, set[Switch]] = {index: set() for index in range(slots)}
        self.free = list(range(slots))

    @rule()
    def acquire(self) -> None:
        slot = self.ring.acquire()
        if slot is None:
            assert not self.free and len(self.held) == self.ring.slots
            return
        assert slot.index == self.free.pop(0)
        assert slot.bytes.numel() == SLOT_BYTES
        assert slot.bytes.storage_offset() == slot.index * SLOT_BYTES
        # The next writer waits for all that is unfinished, well or badly; a reader waits for nothing yet.
        before = slot.fence.before_write()
        assert len(before) == len(self.unfinished[slot.index])
        assert slot.fence.before_read() == ()
        self.held.append(slot)
        self.reads[slot] = []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.held))
        if slot in self.writes and not (self.writes[slot].over and all(read.over for read in self.reads[slot])):
            return
        self.end_all(slot.index)  # events that its writer waits for
        self.writes[slot], self.reads[slot] = Switch(), []
        slot.fence.writes(self.writes[slot])
        self.unfinished[slot.index].add(self.writes[slot])

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        written = [slot for slot in self.held if slot in self.writes]
        if not written:
            return
        slot = data.draw(st.sampled_from(written))
        switch = Switch()
        self.reads[slot].append(switch)
        slot.fence.reads(switch)
        self.unfinished[slot.index].add(switch)

    @rule(data=st.data(), failed=st.booleans())
    def end(self, data: st.DataObject, failed: bool) -> None:
        under_way = [(index, switch) for index, switches in self.unfinished.items() for switch in switches]
        if under_way:
            index, switch = under_way[data.draw(st.integers(0, len(under_way) - 1))]
            switch.over, switch.failed = True, failed
            self.unfinished[index].remove(switch)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        slot.release()
        self.free.append(slot.index)
        self.released.append(slot)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        """Also if the slot has another holder by now."""
        slot = data.draw(st.sampled_from(self.released))
        with pytest.raises(ValueError, match=f"slot {slot.index} .* released before"):
            slot.release()

    @invariant()
    def states(self) -> None:
        self.ring.check_integrity()
        assert self.ring.held == len(self.held)
        assert idle(self.ring) == (not any(self.unfinished.values()))

    def end_all(self, index: int) -> None:
        for switch in self.unfinished[index]:
            switch.over = True
        self.unfinished[index].clear()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_slots_are_parts_of_the_buffer():
    buffer = torch.zeros(3 * SLOT_BYTES, dtype=torch.uint8)
    ring = Ring(3, buffer, Region.LOAD_SLOT)
    for number in range(3):
        acquired(ring).bytes.fill_(number + 1)
    assert buffer.view(3, SLOT_BYTES).tolist() == [[number + 1] * SLOT_BYTES for number in range(3)]
    assert ring.acquire() is None
    assert (ring.slots, ring.slot_bytes, ring.held) == (3, SLOT_BYTES, 3)


def test_a_slot_rests_while_others_are_free():
    """A slot that was just released is taken last, so what still reads it has the most time."""
    ring = ring_of(3)
    order = []
    for _ in range(7):
        slot = acquired(ring)
        order.append(slot.index)
        slot.release()
    assert order == [0, 1, 2, 0, 1, 2, 0]


def test_a_reader_that_came_after_the_release_is_waited_for():
    """A late reader of the fence is a mistake, but corrupts nothing until the slot has another holder."""
    ring, read = ring_of(1), Switch()
    slot = acquired(ring)
    slot.release()
    slot.fence.reads(read)
    assert len(acquired(ring).fence.before_write()) == 1


def test_a_failed_copy_does_not_fail_the_next_holder():
    ring, write = ring_of(1), Switch()
    slot = acquired(ring)
    slot.fence.writes(write)
    slot.release()
    (before,) = acquired(ring).fence.before_write()
    assert not before.done()
    write.over = write.failed = True
    assert before.done()
    before.synchronize()


def test_an_idle_life_leaves_nothing_behind():
    ring, write = ring_of(1), Switch()
    slot = acquired(ring)
    slot.fence.writes(write)
    write.over = True
    slot.release()
    assert acquired(ring).fence.before_write() == ()


@pytest.mark.parametrize(
    ("slots", "buffer", "message"),
    [
        (0, torch.zeros(16, dtype=torch.uint8), "slots = 0 must be 1 or more"),
        (-1, torch.zeros(16, dtype=torch.uint8), "slots = -1 must be 1 or more"),
        (3, torch.zeros(16, dtype=torch.uint8), "16 bytes does not divide into 3 equal slots"),
        (2, torch.zeros(0, dtype=torch.uint8), "0 bytes does not divide into 2"),
        (2, torch.zeros(16), "torch.float32; allowed: one contiguous dimension of torch.uint8"),
        (2, torch.zeros(2, 8, dtype=torch.uint8), r"shape \(2, 8\)"),
        (2, torch.zeros(32, dtype=torch.uint8)[::2], r"shape \(16,\)"),
    ],
)
def test_bad_arguments_of_a_ring_are_refused(slots: int, buffer: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        Ring(slots, buffer, Region.FETCH_SLOT)


def test_integrity_sees():
    ring = ring_of(2)
    slots = [acquired(ring), acquired(ring)]
    ring.check_integrity()
    ring._holders.reverse()
    with pytest.raises(RuntimeError, match="slot 0 of a ring of 2 is held as slot 1"):
        ring.check_integrity()
    assert all(slot.bytes.numel() == SLOT_BYTES for slot in slots)


class Ending(Switch):
    """Ends when something waits for it."""

    def synchronize(self) -> None:
        self.over = True
        super().synchronize()


def test_memory_may_go_once_nothing_is_under_way_in_any_slot():
    ring, events = ring_of(3), [Ending() for _ in range(4)]
    events[1].failed = True
    held, released = acquired(ring), acquired(ring)
    held.fence.writes(events[0])
    held.fence.reads(events[1])
    released.fence.writes(events[2])
    released.release()
    others = acquired(ring), acquired(ring)  # the latter takes over what is under way
    others[1].fence.reads(events[3])
    ring.settle()
    assert idle(ring) and all(event.over for event in events)
