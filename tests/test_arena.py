"""Slots over chunks that the system gives, refuses, or rounds up."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered.offload import arena as arena_module
from tiered.offload.arena import Arena, Slot, device_chunks
from tiered.offload.chunk import Chunk
from tiered.offload.errors import ArenaFullError, PinError, TransferError
from tiered.offload.fence import Region

SLAB = 4 * 4096


class System:
    """Host memory that can refuse, and gives what it likes better where it is told to."""

    def __init__(
        self,
        *,
        refuse_at: int = -1,
        refuse_above: int = 1 << 40,
        rounding: int = 0,
        cap: int = 1 << 40,
        gives: Callable[[int], int] = lambda nbytes: nbytes,
    ):
        self.refuse_at, self.refuse_above, self.rounding, self.cap = refuse_at, refuse_above, rounding, cap
        self.gives = gives
        self.calls: list[int] = []
        self.held = 0  # what the system has given

    def allocate(self, nbytes: int) -> Chunk:
        self.calls.append(nbytes)
        nbytes = self.gives(nbytes)
        if self.held + nbytes > self.cap:
            raise KeyError(nbytes)
        if len(self.calls) - 1 == self.refuse_at or nbytes > self.refuse_above:
            raise PinError(nbytes, "no")
        actual = nbytes + self.rounding
        self.held += actual

        def free() -> None:
            self.held -= actual

        return Chunk(torch.empty(nbytes, dtype=torch.uint8), pinned=True, actual_bytes=actual, before=free)

    def arena(self, capacity: int | None = 4 * SLAB, *, expected: int = 0) -> Arena:
        """`expected`: slabs."""
        return Arena(Region.HOST_SLOT, SLAB, capacity, self.allocate, expected_bytes=expected * SLAB)

    def check(self, arena: Arena, nbytes: int):
        arena.check_integrity()
        assert self.held == arena.actual_bytes == arena.stats().actual_bytes == nbytes


class Copying:
    """An access that ends, badly, when someone waits for it."""

    def __init__(self):
        self.over = False

    def done(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True
        raise TransferError("it failed")


class ArenaMachine(RuleBasedStateMachine):
    """Every record is filled with a byte of its own, which it must still hold when it is released."""

    @initialize(capacity=st.integers(0, 6 * SLAB), expected=st.integers(0, 24), rounding=st.sampled_from([0, 4096]))
    def open(self, capacity: int, expected: int, rounding: int):
        self.system = System(rounding=rounding)
        self.capacity = capacity
        self.arena = self.system.arena(capacity, expected=expected)
        self.records: list[tuple[Slot, int]] = []
        self.number = 0

    @rule(nbytes=st.integers(1, SLAB))
    def place(self, nbytes: int):
        before = self.arena.actual_bytes
        try:
            slot = self.arena.place(nbytes)
        except ArenaFullError as error:
            assert error.capacity == self.capacity
            assert self.arena.book.free_bytes(nbytes) == 0
            assert self.arena.actual_bytes == before
            return
        self.number = self.number % 255 + 1
        assert slot.bytes.shape == (nbytes,)
        assert slot.bytes.data_ptr() == slot.chunk.bytes.data_ptr() + slot.start
        slot.bytes.fill_(self.number)
        self.records.append((slot, self.number))

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        record = slot, number = data.draw(st.sampled_from(self.records))
        assert (slot.bytes == number).all()
        self.records.remove(record)
        slot.release()
        for again in (slot.release, lambda: slot.bytes):
            with pytest.raises(ValueError, match="released"):
                again()

    @invariant()
    def all_is_accounted_for(self):
        self.system.check(self.arena, self.arena.actual_bytes)
        assert self.arena.actual_bytes <= self.capacity
        stats = self.arena.stats()
        assert stats.requested_bytes == sum(slot.nbytes for slot, _ in self.records)
        assert stats.held_bytes == sum(slot.room_bytes for slot, _ in self.records)
        assert stats.pinned == (stats.actual_bytes > 0)

    def teardown(self):
        self.arena.close()
        assert self.system.held == 0


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=30)


def test_neighbours_are_one_piece_of_memory():
    arena = System().arena(expected=16)
    slots = [arena.place(5000) for _ in range(6)]  # two to a slab, two slabs to a chunk
    for earlier, later in pairwise(slots):
        adjacent = earlier.bytes.data_ptr() + earlier.room_bytes == later.bytes.data_ptr()
        assert later.offset == earlier.offset + earlier.room_bytes
        assert adjacent or earlier.chunk is not later.chunk
    assert [later.chunk is earlier.chunk for earlier, later in pairwise(slots)] == [
        *(True, True, True),
        *(False, True),  # another chunk begins
    ]
    assert slots[5].start == slots[0].start + slots[0].room_bytes


def test_a_refused_chunk_leaves_the_earlier_ones_usable():
    system = System(refuse_at=2)
    arena = system.arena()
    slots = [arena.place(SLAB) for _ in range(2)]
    with pytest.raises(PinError):
        arena.place(SLAB)
    system.check(arena, 2 * SLAB)
    slots[0].release()
    assert arena.place(100).chunk is slots[0].chunk
    arena.place(SLAB)  # the system has memory again
    system.check(arena, 3 * SLAB)


def test_rounding_that_does_not_fit_is_given_back():
    system = System(rounding=4096)
    arena = system.arena(SLAB + 4095)
    with pytest.raises(ArenaFullError) as caught:
        arena.place(SLAB)
    assert system.calls == [SLAB]
    system.check(arena, 0)
    del caught  # until here its traceback holds the frame that had the chunk


@pytest.mark.parametrize("slabs", [1, 3, 10])
def test_a_chunk_has_as_many_slabs_as_it_came_with(slabs: int):
    system = System(gives=lambda nbytes: slabs * SLAB)
    arena = system.arena(None, expected=16)
    slots = [arena.place(SLAB) for _ in range(7)]
    assert len(system.calls) == -(-7 // slabs) and len({id(slot.chunk) for slot in slots}) == len(system.calls)
    system.check(arena, len(system.calls) * slabs * SLAB)
    arena.close()
    assert system.held == 0


def test_the_last_chunk_is_what_capacity_leaves():
    system = System()
    arena = system.arena(3 * SLAB + 4096, expected=16)
    for _ in range(3):
        arena.place(SLAB)
    assert system.calls == [2 * SLAB, SLAB]
    with pytest.raises(ArenaFullError, match="host_slots of 53248 bytes has no room for 4096 bytes") as caught:
        arena.place(1)
    assert (caught.value.needed, caught.value.available, caught.value.capacity) == (4096, 0, 3 * SLAB + 4096)


@pytest.mark.parametrize("refuses", ["budget", "system"])
def test_less_than_a_chunk_is_obtained_where_a_whole_one_is_refused(refuses: str):
    """The capacity is a tier's, of which something else may hold a part: a ring, say."""
    system = System(cap=3 * SLAB) if refuses == "budget" else System(refuse_above=2 * SLAB)
    arena = system.arena(None, expected=64)
    for _ in range(3):
        arena.place(SLAB)
    system.check(arena, (3 if refuses == "budget" else 4) * SLAB)
    if refuses == "budget":
        with pytest.raises(KeyError):
            arena.place(SLAB)
        system.check(arena, 3 * SLAB)
    arena.close()
    assert system.held == 0


def test_what_is_expected_comes_in_large_pieces_and_the_rest_by_the_slab(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arena_module, "CHUNK_BYTES", 3 * SLAB)
    for expected, calls in ((0, [1] * 6), (20, [2] * 10 + [1] * 3), (35, [3] * 11 + [2] + [1] * 3)):
        system = System()
        arena = system.arena(None, expected=expected)
        for _ in range(sum(calls)):
            arena.place(SLAB)
        assert system.calls == [slabs * SLAB for slabs in calls]
        arena.close()


def test_bytes_handed_out_again_carry_what_is_under_way():
    arena = System().arena(SLAB)
    slot, read, write = arena.place(4096), Copying(), Copying()
    slot.fence.writes(write)
    slot.fence.reads(read)
    slot.release()
    again = arena.place(4000)
    assert again.start == slot.start
    assert set(again.fence.before_write()) == {write, read}
    again.release()
    other = arena.place(SLAB)  # another size class
    assert set(other.fence.before_write()) == set(other.fence.before_read()) == {write, read}


def test_closing_waits_and_gives_everything_back():
    system = System()
    arena = system.arena()
    used, released, copies = arena.place(SLAB), arena.place(100), [Copying(), Copying()]
    used.fence.reads(copies[0])
    released.fence.writes(copies[1])
    released.release()
    arena.close()
    assert all(copy.over for copy in copies)
    arena.close()
    system.check(arena, 0)
    stats = arena.stats()
    assert (stats.requested_bytes, stats.held_bytes, stats.pinned) == (0, 0, False)
    verbs: list[Callable[[], object]] = [
        lambda: arena.place(1),
        used.release,
        lambda: used.bytes,
    ]
    for verb in verbs:
        with pytest.raises(ValueError, match=r"closed|released"):
            verb()


def test_waiting_comes_before_freeing():
    system = System()
    arena = system.arena()

    class Asking(Copying):
        def synchronize(self) -> None:
            held.append(system.held)
            super().synchronize()

    held: list[int] = []
    arena.place(100).fence.writes(Asking())
    arena.close()
    assert held == [SLAB]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4097, SLAB, 0), "slab_bytes = 4097"),
        ((SLAB, -1, 0), "capacity = -1"),
        ((SLAB, SLAB, -1), "expected_bytes = -1"),
    ],
)
def test_sizes_that_do_not_work(arguments: tuple[int, int, int], message: str):
    slab_bytes, capacity, expected_bytes = arguments
    with pytest.raises(ValueError, match=message):
        Arena(Region.HOST_SLOT, slab_bytes, capacity, System().allocate, expected_bytes=expected_bytes)


def test_requests_that_do_not_work():
    arena = System().arena()
    for nbytes in (0, SLAB + 1):
        with pytest.raises(ValueError, match=f"record of {nbytes} bytes"):
            arena.place(nbytes)
    assert arena.actual_bytes == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda arena, slot: setattr(arena, "actual_bytes", 1),
        lambda arena, slot: arena.book.add_slabs(1),
        lambda arena, slot: setattr(slot, "start", 4096),
        lambda arena, slot: setattr(slot, "_bytes", slot.bytes[:-1]),
        lambda arena, slot: setattr(arena, "capacity", SLAB - 1),
        lambda arena, slot: arena._slots.clear(),
    ],
)
def test_damage_is_found(damage: Callable[[Arena, Slot], object]):
    arena = System().arena()
    slot = arena.place(5000)
    arena.check_integrity()
    damage(arena, slot)
    with pytest.raises(RuntimeError):
        arena.check_integrity()


def test_the_device_tier_is_an_arena_too():
    arena = Arena(Region.DEVICE_SLOT, SLAB, SLAB, device_chunks(torch.device("cpu")))
    slot = arena.place(100)
    assert slot.bytes.device.type == "cpu"
    assert slot.fence.region == Region.DEVICE_SLOT
    assert not arena.stats().pinned
    arena.check_integrity()


def test_a_device_without_memory_names_the_knob(monkeypatch: pytest.MonkeyPatch):
    def empty(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    arena = Arena(Region.DEVICE_SLOT, SLAB, SLAB, device_chunks(torch.device("cuda")))
    with pytest.raises(ArenaFullError, match="device=") as caught:
        arena.place(100)
    assert (caught.value.available, caught.value.capacity) == (10, 100)
    monkeypatch.undo()
    arena.check_integrity()
    assert arena.actual_bytes == 0


@pytest.mark.gpu
def test_records_on_the_device():
    device = torch.device("cuda")
    arena = Arena(Region.DEVICE_SLOT, SLAB, 2 * SLAB, device_chunks(device), expected_bytes=16 * SLAB)
    slots = [arena.place(5000) for _ in range(4)]
    for number, slot in enumerate(slots):
        slot.bytes.fill_(number)
    assert [int(slot.bytes.min()) for slot in slots] == [int(slot.bytes.max()) for slot in slots] == [0, 1, 2, 3]
    arena.check_integrity()
    arena.close()
