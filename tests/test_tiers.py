"""Tiers: their counts, typed errors of failures, and that nothing is left after any of them."""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import torch
from simulation import Link, LinkSpeed, Point, SimulatedThreads
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.chunk import Chunk
from tiered.offload.errors import PinError, TransferError
from tiered.offload.fence import Region
from tiered.offload.lane import Lane
from tiered.offload.pinning import PageablePinner
from tiered.tiers import host_pool
from tiered.tiers import tiers as tiers_module
from tiered.tiers.parts import Wanted
from tiered.tiers.residency import Residency
from tiered.tiers.tiers import Tiers

CPU, NBYTES, ROOM = torch.device("cpu"), 5000, 8192
EVERY = np.ones(1, dtype=bool)  # part of a record


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(MemoryBudget(device="1MiB", host=6 * ROOM))


@pytest.fixture
def tiers(ledger: Ledger) -> Iterator[Tiers]:
    with Tiers(ledger, device=CPU) as tiers:
        yield tiers
    nothing_is_left(ledger)


def nothing_is_left(ledger: Ledger) -> None:
    ledger.check_integrity()
    assert all(ledger.held(tier) == 0 for tier in Tier)


def bytes_of(key: int) -> Tensor:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(key))


def records(tiers: Tiers, *keys: int, slots: int = 2) -> Residency:
    """Records of their own layer in host memory."""
    residency = Residency(tiers.traffic, tiers.record)
    tiers.memory.callback(residency.close)
    residency.open(tiers.slots(Region.FETCH_SLOT, slots, ROOM))
    for key in keys:
        add(tiers, residency, key)
    return residency


def add(tiers: Tiers, residency: Residency, key: int) -> None:
    home = tiers.host_home(Account.WEIGHTS, NBYTES, ROOM)
    assert home.memory is not None
    home.memory.copy_(bytes_of(key))
    residency.place(key, home, layer=key)


def use(residency: Residency, *keys: int, ahead: tuple[int, ...] = ()) -> None:
    views = residency.use([Wanted(key) for key in keys], [Wanted(key) for key in ahead])
    assert all(torch.equal(view, bytes_of(key)) for key, view in zip(keys, views, strict=True))
    residency.check_integrity()


# --- counts


def test_copies_are_counted_by_the_layer_of_their_records(tiers: Tiers):
    residency = records(tiers, 3, 5)
    use(residency, 3, 5)
    use(residency, 5)
    residency.write(5, EVERY)
    residency.patch(5)
    stats = tiers.ended()
    jobs = {layer: {way: counted.jobs for way, counted in ways.items()} for layer, ways in stats.layers.items()}
    assert jobs == {
        3: {Lane.STORE: 0, Lane.FETCH: 1, Lane.SAVE: 0, Lane.LOAD: 0},
        5: {Lane.STORE: 1, Lane.FETCH: 1, Lane.SAVE: 0, Lane.LOAD: 0},
    }
    assert (stats.ways[Lane.FETCH].nbytes, stats.layers[5][Lane.STORE].nbytes) == (2 * NBYTES, NBYTES)
    told = json.loads(json.dumps(stats.as_dict()))["layers"]
    assert list(told) == ["3", "5"] and told["5"]["store"]["nbytes"] == NBYTES
    tiers.restart_stats()
    assert not tiers.stats().layers and tiers.stats().pinned_requested == 2 * ROOM


def test_a_ring_in_host_memory_counts_as_pinned_memory(tiers: Tiers):
    with ExitStack() as opened:
        tiers.slots(Region.LOAD_SLOT, 3, ROOM, opened)
        assert tiers.stats().pinned_requested == 3 * ROOM
    assert tiers.stats().pinned_requested == 0


def test_a_slow_link_is_hidden_or_exposed_in_its_layer(ledger: Ledger):
    seconds = 0.05
    transport = SimulatedThreads(link=Link(fetch=LinkSpeed(latency=seconds)))
    with Tiers(ledger, device=CPU, transport=transport) as tiers:
        residency = records(tiers, 1, 2)
        residency.use([], [Wanted(1)])
        tiers.synchronize()
        use(residency, 1)
        use(residency, 2)
        stats = tiers.ended()
        hidden, exposed = (stats.layers[layer][Lane.FETCH] for layer in (1, 2))
    assert (hidden.late, exposed.late) == (0, 1)
    assert hidden.busy_ns >= seconds * 1e9 and hidden.hidden_ns >= 0.5 * seconds * 1e9
    assert exposed.exposed_ns >= 0.5 * seconds * 1e9 > hidden.exposed_ns
    assert stats.ways[Lane.FETCH].gigabytes_per_second is not None


def test_using_and_writing_a_record_waits_for_no_copy(ledger: Ledger):
    link = Link(fetch=LinkSpeed(latency=0.6), store=LinkSpeed(latency=0.6))
    transport = SimulatedThreads(link=link, compute_thread=True)
    with Tiers(ledger, device=CPU, transport=transport) as tiers:
        residency = records(tiers, 1, 2, 3)
        begin = time.monotonic()
        for key in (1, 2, 3, 1):  # one more than there are slots
            residency.use([Wanted(key)], [Wanted(key % 3 + 1)])
            residency.write(key, EVERY)
            residency.patch(key)
        assert time.monotonic() - begin < 0.5


# --- memory that others had, or that is not there


class Earlier:
    """A kernel of a former owner of some memory: it still writes there a moment after others have obtained it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.over = memory, threading.Event()
        threading.Timer(0.05, self.run).start()

    def run(self) -> None:
        self.memory.fill_(255)
        self.over.set()

    def done(self) -> bool:
        return self.over.is_set()

    def synchronize(self) -> None:
        assert self.over.wait(20)


def test_slots_are_used_once_their_earlier_owners_are_done(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    kernels: list[Earlier] = []

    def allocate(nbytes: int) -> Chunk:
        kernels.append(Earlier(torch.zeros(nbytes, dtype=torch.uint8)))
        return Chunk(kernels[-1].memory, pinned=False, actual_bytes=nbytes, earlier=(kernels[-1],))

    monkeypatch.setattr(tiers_module, "device_chunks", lambda device: allocate)
    with Tiers(ledger, device=CPU) as tiers:
        residency = records(tiers, 1, 2)
        views = residency.use([Wanted(1), Wanted(2)])
        kernels[0].synchronize()
        assert torch.equal(views[0], bytes_of(1)) and torch.equal(views[1], bytes_of(2))
    assert len(kernels) == 1


@pytest.mark.parametrize(
    "obtain",
    [lambda tiers: tiers.slots(Region.FETCH_SLOT, 2, ROOM), lambda tiers: tiers.on_device(Account.HIDDEN, ROOM)],
    ids=["slots", "on the device"],
)
def test_a_device_without_memory_is_named(tiers: Tiers, monkeypatch: pytest.MonkeyPatch, obtain: Callable):
    def empty(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    with pytest.raises(TierCapacityError, match=r"MemoryBudget\(device=") as caught:
        obtain(tiers)
    assert (caught.value.tier, caught.value.available) == (Tier.DEVICE, 10)
    monkeypatch.undo()
    assert tiers.ledger.held(Tier.DEVICE) == 0
    obtain(tiers)


class RefusingPinner(PageablePinner):
    """Has no more than `allowed` chunks to give."""

    allowed = 2

    def allocate(self, nbytes: int) -> Chunk:
        if RefusingPinner.allowed == 0:
            raise PinError(nbytes, f"cannot pin {nbytes} bytes of host memory; lower memory=MemoryBudget(host=…)")
        RefusingPinner.allowed -= 1
        return super().allocate(nbytes)


def test_a_refused_pin_leaves_earlier_memory_usable(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_pool, "pick_pinner", RefusingPinner)
    monkeypatch.setattr(RefusingPinner, "allowed", 2)
    with Tiers(ledger, device=CPU) as tiers:
        residency = records(tiers, 1, 2)
        with pytest.raises(TierCapacityError, match=r"cannot pin.*MemoryBudget\(host=") as caught:
            add(tiers, residency, 3)
        assert caught.value.tier is Tier.HOST and ledger.held(Tier.HOST) == 2 * ROOM
        use(residency, 1, 2)
        residency.remove(1)
        add(tiers, residency, 3)  # where the first one was
        use(residency, 2, 3)
        tiers.check_integrity()
    nothing_is_left(ledger)


# --- faults


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lane", [Lane.STORE, Lane.FETCH])
def test_a_dead_thread_is_an_error_and_never_waited_for(ledger: Ledger, lane: Lane):
    def killed(point: Point, of: Lane | None) -> float:
        if point is Point.COPY and of is lane:
            raise SystemExit("killed")
        return 0.0

    with Tiers(ledger, device=CPU, transport=SimulatedThreads(delay=killed)) as tiers:
        residency = records(tiers, 1, 2, 3, slots=1)
        with pytest.raises(TransferError, match=r"died|killed"):
            for key in (1, 2, 3, 1):
                residency.use([Wanted(key)])
                residency.write(key, EVERY)
                residency.patch(key)
        residency.check_integrity()
    nothing_is_left(ledger)


def test_a_transport_that_is_gone_costs_nothing(ledger: Ledger):
    transport = SimulatedThreads()
    with Tiers(ledger, device=CPU, transport=transport) as tiers:
        residency = records(tiers, 1, 2)
        use(residency, 1)
        transport.close()
        with pytest.raises(TransferError, match="closed"):
            residency.use([Wanted(2)])
        tiers.check_integrity()
    nothing_is_left(ledger)


def test_an_error_in_between_leaves_nothing(ledger: Ledger):
    before, transport = threading.enumerate(), SimulatedThreads(link=Link(fetch=LinkSpeed(latency=0.05)))
    with suppress(KeyboardInterrupt), Tiers(ledger, device=CPU, transport=transport) as tiers:
        residency = records(tiers, 1, 2)
        residency.use([], [Wanted(1), Wanted(2)])
        tiers.on_device(Account.HIDDEN, ROOM)
        raise KeyboardInterrupt
    nothing_is_left(ledger)
    assert not {*threading.enumerate()}.difference(before)
    tiers.close()


def in_a_child(work: Callable[[], None]) -> int:
    """The exit status of `work` in a forked child: 0 if it returned, 1 if it raised, 2 if it hung for 20 s."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_the_parent_goes_on(tiers: Tiers):
    residency = records(tiers, 1, 2)
    residency.use([], [Wanted(1)])

    def child() -> None:
        with pytest.raises(TransferError, match="fork"):
            residency.use([Wanted(2)])
        tiers.close()

    assert in_a_child(child) == 0
    use(residency, 1, 2)
