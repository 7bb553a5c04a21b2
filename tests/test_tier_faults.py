"""Faults: a typed error that names what to change, nothing leaked, and the next operation works."""

import os
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
from simulation import Point, SimulatedThreads
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Feature, Tier
from tiered.core.ledger import Ledger
from tiered.offload.chunk import Chunk
from tiered.offload.errors import PinError, TransferError
from tiered.offload.pinning import PageablePinner
from tiered.offload.transport import Lane
from tiered.tiers import host_pool
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_tiers
from tiered.tiers.record_book import RecordKey
from tiered.tiers.record_bytes import StagingSizes

WIDTH, ROWS, SLOT = 96, 10, 16384


def keys(*parts: int) -> list[RecordKey]:
    return [RecordKey(Feature.HIDDEN, 0, 0, part) for part in parts]


def rows_of(*parts: int) -> Tensor:
    return torch.cat([torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(part)) for part in parts])


def store(tiers: TierManager, *parts: int) -> None:
    tiers.store(keys(*parts), rows_of(*parts), [ROWS] * len(parts), codec="raw")


def works(tiers: TierManager) -> None:
    """A record goes down and back, and the books are in order."""
    store(tiers, 99)
    assert torch.equal(tiers.fetch(keys(99)).wait(), rows_of(99))
    tiers.synchronize()
    tiers.check_integrity()
    assert tiers._shipping.free_slots == StagingSizes().fetch_slots, "a staging slot leaked"


class Faults:
    """Raises what a test has set, at the next copy of that lane."""

    def __init__(self) -> None:
        self.next: dict[Lane, BaseException] = {}

    def __call__(self, point: Point, lane: Lane | None) -> float:
        if point is Point.COPY and lane is not None and lane in self.next:
            raise self.next.pop(lane)
        return 0.0


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(MemoryBudget(host=8 * SLOT))


@pytest.fixture
def tiers(ledger: Ledger, faults: Faults) -> Iterator[TierManager]:
    with open_tiers(ledger, device="cpu", slot_bytes=SLOT, transport=SimulatedThreads(delay=faults)) as tiers:
        yield tiers
    assert all(ledger.held(tier) == 0 for tier in Tier)


def test_records_of_a_failed_store_cannot_be_fetched_until_they_are_stored_again(tiers: TierManager, faults: Faults):
    store(tiers, 1)
    tiers.synchronize()
    faults.next[Lane.STORE] = OSError("the bus is down")
    store(tiers, 2, 3)
    tiers.synchronize()
    for _ in range(2):
        with pytest.raises(TransferError, match="the bus is down"):
            tiers.fetch(keys(3)).wait()
    assert tiers.stats().ways[Lane.STORE].failed == 1
    assert torch.equal(tiers.fetch(keys(1)).wait(), rows_of(1))
    store(tiers, 3)
    assert torch.equal(tiers.fetch(keys(3)).wait(), rows_of(3))
    works(tiers)


def test_a_fetch_of_a_store_that_fails_fails_with_it(tiers: TierManager, faults: Faults):
    faults.next[Lane.STORE] = OSError("the bus is down")
    store(tiers, 1)
    with pytest.raises(TransferError):
        tiers.fetch(keys(1)).wait()
    works(tiers)


def test_a_failed_fetch_can_be_made_again(tiers: TierManager, faults: Faults, ledger: Ledger):
    store(tiers, 1)
    faults.next[Lane.FETCH] = OSError("the bus is down")
    with pytest.raises(TransferError, match="the bus is down"):
        tiers.fetch(keys(1)).wait()
    tiers.synchronize()
    assert "host->device" not in ledger.report().moved
    assert torch.equal(tiers.fetch(keys(1)).wait(), rows_of(1))
    works(tiers)


def test_a_transport_that_is_gone_costs_no_slot(tiers: TierManager, ledger: Ledger):
    store(tiers, 1)
    tiers.synchronize()
    held = ledger.held(Tier.HOST, Account.HIDDEN)
    tiers._transport.close()
    ticket = tiers.fetch(keys(1))
    with pytest.raises(TransferError, match="closed"):
        ticket.wait()
    with pytest.raises(TransferError, match="closed"):
        store(tiers, 2, 3)
    tiers.check_integrity()
    assert tiers._shipping.free_slots == StagingSizes().fetch_slots
    assert tiers._shipping._rings.store.held == 0
    assert ledger.held(Tier.HOST, Account.HIDDEN) == held


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lane", [Lane.STORE, Lane.FETCH])
def test_a_dead_thread_is_told_and_never_waited_for(tiers: TierManager, faults: Faults, lane: Lane):
    store(tiers, 1, 2)
    tiers.synchronize()
    faults.next[lane] = SystemExit("killed")
    tickets = [tiers.fetch(keys(part)) for part in (1, 2)]
    with pytest.raises(TransferError, match=r"died|killed"):
        for ticket in tickets:
            ticket.wait()
        store(tiers, 3)
        tiers.synchronize()
        tiers.fetch(keys(3)).wait()
    for ticket in tickets:
        ticket.close()
    tiers.check_integrity()


class RefusingPinner(PageablePinner):
    """Has no more than `allowed` chunks to give."""

    allowed = 10

    def allocate(self, nbytes: int) -> Chunk:
        if RefusingPinner.allowed == 0:
            raise PinError(nbytes, f"cannot pin {nbytes} bytes of host memory; lower memory=MemoryBudget(host=…)")
        RefusingPinner.allowed -= 1
        return super().allocate(nbytes)


def test_a_refused_pin_leaves_what_is_there_usable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_pool, "pick_pinner", lambda name, device: RefusingPinner(device))
    monkeypatch.setattr(RefusingPinner, "allowed", 2)
    ledger = Ledger(MemoryBudget(host="1MiB"))
    with open_tiers(ledger, device="cpu", slot_bytes=SLOT) as tiers:
        store(tiers, *range(8))
        with pytest.raises(TierCapacityError, match=r"cannot pin.*MemoryBudget\(host=") as caught:
            store(tiers, 8)
        assert caught.value.tier is Tier.HOST
        assert ledger.held(Tier.HOST) == 2 * SLOT
        tiers.check_integrity()
        tiers.forget(keys(0))
        store(tiers, 8)
        assert torch.equal(tiers.fetch(keys(*range(1, 9))).wait(), rows_of(*range(1, 9)))
        monkeypatch.setattr(RefusingPinner, "allowed", 1)
        store(tiers, 9)
    assert ledger.held(Tier.HOST) == 0


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
def test_a_forked_child_is_told_and_the_parent_goes_on(tiers: TierManager):
    store(tiers, 1)
    ticket = tiers.fetch(keys(1))

    def child() -> None:
        for call in (lambda: store(tiers, 2), lambda: tiers.fetch(keys(1)).wait()):
            with pytest.raises(TransferError, match="fork"):
                call()
        tiers.close()

    assert in_a_child(child) == 0
    assert torch.equal(ticket.wait(), rows_of(1))
    works(tiers)
