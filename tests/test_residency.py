"""Records in residency: use, copies ahead, writes through to homes, and failures."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from simulation import Point, SimulatedThreads
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.copy_segments import Segment
from tiered.offload.errors import TransferError
from tiered.offload.fence import Fence, Region
from tiered.offload.file_record import FilePiece, FileRecord, ReadFile
from tiered.offload.lane import Lane
from tiered.tiers.parts import Parts, Wanted
from tiered.tiers.residency import Residency
from tiered.tiers.tiers import Home, Tiers

CPU, NBYTES, ROOM, SLOTS = torch.device("cpu"), 5000, 8192, 3
Delay = Callable[[Point, Lane | None], float]
faults: set[Lane] = set()


def fault(point: Point, lane: Lane | None) -> float:
    if point is Point.COPY and lane in faults:
        faults.discard(lane)
        raise OSError("the bus is down")
    return 0.0


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    faults.clear()
    ledger = Ledger(MemoryBudget(host=8 * ROOM, disk=2 * ROOM, disk_path=tmp_path))
    tiers = Tiers(ledger, device=CPU, transport=SimulatedThreads(delay=fault))
    yield tiers
    tiers.close()
    assert all(ledger.held(tier) == ledger.idle(tier) == 0 for tier in Tier)


def bytes_of(key: object) -> Tensor:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(hash(key) % 997))


@pytest.fixture
def residency(tiers: Tiers) -> Iterator[Residency]:
    residency = Residency(tiers.traffic, tiers.record, tiers.slots(Region.LOAD_SLOT, 1, ROOM))
    residency.open(tiers.slots(Region.FETCH_SLOT, SLOTS, ROOM))
    made = [(layer, expert) for layer in range(2) for expert in range(3)]
    for key in made:
        home = tiers.host_home(Account.WEIGHTS, NBYTES, ROOM)
        assert home.memory is not None
        home.memory.copy_(bytes_of(key))
        residency.place(key, home, layer=key[0])
    yield residency
    residency.check_integrity()
    tiers.check_integrity()
    residency.close_slots()
    for key in [*made, "more"]:
        if key in residency:
            residency.remove(key)


def used(residency: Residency, *keys: object, ahead: tuple[object, ...] = ()) -> None:
    views = residency.use([Wanted(key) for key in keys], [Wanted(key) for key in ahead])
    assert all(torch.equal(view, bytes_of(key)) for key, view in zip(keys, views, strict=True))


def fetched(tiers: Tiers) -> int:
    return tiers.ended().ways[Lane.FETCH].copies


def test_the_experts_that_a_router_picks_come_at_once_and_guesses_before_them(tiers: Tiers, residency: Residency):
    used(residency, (0, 2), (0, 0), ahead=((1, 1),))
    assert fetched(tiers) == 3
    used(residency, (1, 1), (1, 0))
    assert fetched(tiers) == 4
    used(residency, (1, 1), ahead=((0, 0), (0, 1), (0, 2)))  # of three guesses, two find a slot
    assert fetched(tiers) in (5, 6)
    used(residency, (0, 0), (0, 1))
    assert tiers.ended().layers.keys() == {0, 1} and tiers.stats().ways[Lane.FETCH].failed == 0


def test_copies_ahead_take_no_slot_in_use(tiers: Tiers, residency: Residency):
    views = residency.use([Wanted((0, 0)), Wanted((0, 1)), Wanted((0, 2))], [Wanted((1, 0))])
    before = [view.clone() for view in views]
    tiers.synchronize()
    assert all(map(torch.equal, views, before)) and fetched(tiers) == 3


def test_a_report_after_rest_has_every_copy_that_compute_waited_for(tiers: Tiers, residency: Residency):
    used(residency, (0, 0), (1, 2))
    residency.rest()
    assert tiers.ledger.moved[Tier.HOST, Tier.DEVICE] == 2 * NBYTES


def test_the_end_of_tiers_gives_back_homes_that_their_owner_has_not(tiers: Tiers):
    here = tiers.host_home(Account.WEIGHTS, NBYTES, ROOM)
    there = tiers.to_scratch(here, Account.WEIGHTS, ROOM)
    assert tiers.ledger.held(Tier.HOST) and tiers.ledger.held(Tier.DISK)
    tiers.close()
    for home in (here, there):  # too late, and no second time
        home.free()
    assert not any(tiers.ledger.held(tier) - tiers.ledger.idle(tier) for tier in Tier)


def test_more_records_than_slots_are_refused(residency: Residency):
    with pytest.raises(ValueError, match="too few slots"):
        residency.use([Wanted((0, 0)), Wanted((0, 1)), Wanted((0, 2)), Wanted((1, 0))])
    used(residency, (1, 2))


class Halves:
    parts = 2

    def segments(self, parts: Parts) -> list[Segment]:
        half = NBYTES // 2
        return [Segment((1 - part) * half, part * half, half) for part in range(2) if parts[part]]


def test_written_pieces_go_through_and_nothing_else_is_moved(tiers: Tiers, residency: Residency):
    first, second = np.array([True, False]), np.array([False, True])
    home = tiers.host_home(Account.WEIGHTS, NBYTES, ROOM)
    residency.place("more", home, layout=Halves(), filled=False)
    (slot,) = residency.use([Wanted("more", ~first)])
    residency.write("more", first)
    assert fetched(tiers) == 0  # nothing was ever written
    slot[: NBYTES // 2] = 7
    residency.patch("more", Halves().segments(first))
    used(residency, (0, 0), (0, 1), (0, 2))  # it leaves without a copy
    assert tiers.ended().ways[Lane.STORE].nbytes == NBYTES // 2 and home.memory is not None
    assert (home.memory[NBYTES // 2 :] == 7).all()
    (slot,) = residency.use([Wanted("more")])
    assert (slot[: NBYTES // 2] == 7).all() and tiers.ended().ways[Lane.FETCH].nbytes == 3 * NBYTES + NBYTES // 2
    assert list(residency.brought(Wanted("more"))) == [True, False]
    residency.use([Wanted("more", second)])
    residency.write("more", first | second)
    slot[:] = 8
    residency.patch("more", Halves().segments(first | second))
    assert not residency.brought(Wanted("more")).any()
    tiers.synchronize()
    assert (home.memory == 8).all()


def test_a_failed_copy_up_is_an_error_and_the_next_one_comes(residency: Residency):
    faults.add(Lane.FETCH)
    with pytest.raises(TransferError, match="bus is down"):
        used(residency, (0, 0))
    used(residency, (0, 0), (1, 0))


def test_parts_that_did_not_come_are_not_there_because_others_came(tiers: Tiers, residency: Residency):
    residency.place("more", tiers.host_home(Account.WEIGHTS, NBYTES, ROOM), layout=Halves())
    first = np.array([True, False])
    faults.add(Lane.FETCH)
    residency.use([], [Wanted("more", first)])
    tiers.synchronize()
    with pytest.raises(TransferError, match="bus is down"):
        residency.use([Wanted("more", ~first)])
    residency.use([Wanted("more", ~first)])
    assert not residency.missing(Wanted("more", ~first)).any() and residency.missing(Wanted("more", first)).any()


def test_a_record_whose_home_missed_a_write_is_never_read_as_if_it_had_not(residency: Residency):
    every = np.ones(1, dtype=bool)
    for lost in (True, False):
        faults.update([Lane.STORE] if lost else [])
        (slot,) = residency.use([Wanted((0, 0))])
        residency.write((0, 0), every)
        slot[:100] = 1
        residency.patch((0, 0), [Segment(0, 0, 100)])
    used(residency, (0, 1), (0, 2), (1, 0))
    with pytest.raises(TransferError, match="bus is down"):
        residency.use([Wanted((0, 0))])


def test_records_in_files_come_by_way_of_host_memory(tiers: Tiers, residency: Residency, tmp_path: Path):
    path, half = tmp_path / "weights", NBYTES // 2
    path.write_bytes(bytes(3) + bytes(bytes_of("more").tolist()))
    opened = ReadFile(path)
    pieces = [FilePiece(opened, 3 + half, half, half), FilePiece(opened, 3, half, 0)]
    residency.place("more", Home.in_files(FileRecord(NBYTES, pieces)))
    residency.move((0, 0), tiers.to_scratch(residency.home((0, 0)), Account.WEIGHTS, ROOM))
    assert tiers.ledger.accounts(Tier.DISK) == {Account.WEIGHTS: NBYTES, Account.SPARE: ROOM - NBYTES}
    for _ in range(2):
        used(residency, "more", (0, 0), ahead=((0, 1),))
        used(residency, (0, 1), (1, 1), (1, 2))
    assert tiers.ended().asked[Tier.DISK] == 4
    residency.move((0, 0), tiers.to_host(residency.home((0, 0)), Account.WEIGHTS, ROOM))
    assert tiers.ledger.held(Tier.DISK) == tiers.scratch_bytes == 0
    used(residency, (0, 0))
    into = torch.zeros(NBYTES, dtype=torch.uint8)
    residency.copy_out("more", [Segment(0, 0, NBYTES)], into, Fence(Region.DEVICE_SLOT))
    assert torch.equal(into, bytes_of("more"))


def test_a_disk_that_is_full_or_fails_leaves_the_record_in_place(tiers: Tiers, residency: Residency):
    faults.add(Lane.SAVE)
    with pytest.raises(TransferError, match="bus is down"):
        tiers.to_scratch(residency.home((0, 0)), Account.WEIGHTS, ROOM)
    for key in ((0, 0), (0, 1)):
        residency.move(key, tiers.to_scratch(residency.home(key), Account.WEIGHTS, ROOM))
    with pytest.raises(TierCapacityError, match="disk"):
        tiers.to_scratch(residency.home((0, 2)), Account.WEIGHTS, ROOM)
    faults.add(Lane.LOAD)
    with pytest.raises(TransferError, match="bus is down"):
        tiers.to_host(residency.home((0, 1)), Account.WEIGHTS, ROOM)
    used(residency, (0, 0), (0, 1), (0, 2))


def test_there_is_one_record_of_a_key(tiers: Tiers, residency: Residency):
    with pytest.raises(ValueError, match="already"):
        residency.place((0, 0), residency.home((0, 0)))
    with pytest.raises(KeyError):
        residency.use([Wanted((7, 7))])
    residency.remove((0, 0))
    assert (0, 0) not in residency
