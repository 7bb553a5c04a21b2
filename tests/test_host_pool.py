"""Host memory that one call after another uses: its bytes, the room that it gives up, and its return after a call."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from simulation import SimulatedThreads

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.models.llada import LLaDA
from tiered.offload.chunk import Chunk
from tiered.offload.codec_bytes import Codec
from tiered.offload.errors import PinError, TransferError
from tiered.offload.pinning import PageablePinner
from tiered.offload.transport import TransferEvent
from tiered.planning.workload import UNCAPPED, Workload
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from tiered.tiers.host_pool import HostPool, booked
from tiered.tiers.record_bytes import RecordBytes
from tiered.tiers.stored_rows import StoredCluster, StoredRows
from tiered.tiers.tiers import Tiers

CPU, KIB = torch.device("cpu"), 1024
ROWS = RecordBytes(
    tier=Tier.HOST, codec=Codec.RAW, regions=1, rows=4, row_bytes=32, clusters=1, centroid_bytes=0, record_rows=4,
    slots=1,
)  # fmt: skip
CLUSTER = [StoredCluster(0, 0, slice(0, 4))]


class System:
    """Host memory that can refuse, and rounds up."""

    def __init__(self, ledger: Ledger, *, most: int = 1 << 40, rounding: int = 0) -> None:
        self.ledger, self.most, self.rounding = ledger, most, rounding
        self.calls: list[int] = []
        self.held = 0

    def allocate(self, nbytes: int) -> Chunk:
        assert self.held + nbytes <= self.ledger.held(Tier.HOST), "memory is booked before it is there"
        self.calls.append(nbytes)
        actual = nbytes + self.rounding
        if self.held + actual > self.most:
            raise PinError(nbytes, "no")
        self.held += actual

        def gone() -> None:
            self.held -= actual

        return Chunk(torch.empty(nbytes, dtype=torch.uint8), pinned=True, actual_bytes=actual, before=gone)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all host memory that is obtained."""
    calls: list[int] = []
    allocate = PageablePinner.allocate

    def counted(pinner: PageablePinner, nbytes: int) -> Chunk:
        calls.append(nbytes)
        return allocate(pinner, nbytes)

    monkeypatch.setattr(PageablePinner, "allocate", counted)
    return calls


def pool_over(system: System, monkeypatch: pytest.MonkeyPatch) -> HostPool:
    monkeypatch.setattr(PageablePinner, "allocate", lambda _, nbytes: system.allocate(nbytes))
    return HostPool(system.ledger, CPU)


@pytest.mark.parametrize(
    ("cap", "most", "rounding", "refusal", "calls"),
    [
        (None, 1 << 40, 0, None, 1),
        (5 * KIB, 1 << 40, KIB, None, 1),
        (4 * KIB - 1, 1 << 40, 0, TierCapacityError, 0),
        (5 * KIB - 1, 1 << 40, KIB, TierCapacityError, 1),
        (None, 4 * KIB - 1, 0, PinError, 1),
    ],
)
def test_memory_is_in_the_books_as_long_as_it_is_there(
    cap: int | None, most: int, rounding: int, refusal: type[Exception] | None, calls: int
):
    ledger = Ledger(MemoryBudget(host=cap))
    system = System(ledger, most=most, rounding=rounding)
    obtain = booked(ledger, Tier.HOST, system.allocate)
    if refusal is None:
        chunk = obtain(4 * KIB)
        assert ledger.accounts(Tier.HOST) == {Account.SPARE: chunk.actual_bytes} == {Account.SPARE: system.held}
        chunk.free()
        chunk.free()
    else:
        with pytest.raises(refusal):
            obtain(4 * KIB)
    assert len(system.calls) == calls and system.held == ledger.held(Tier.HOST) == 0


@pytest.mark.parametrize(
    ("asked", "given"), [(4, 4), (5, None), (3, None)], ids=["exactly that", "not less", "not more"]
)
def test_returned_memory_is_given_again(asked: int, given: int | None, monkeypatch: pytest.MonkeyPatch):
    system = System(Ledger())
    pool = pool_over(system, monkeypatch)
    for chunk in [pool.take(size * KIB) for size in (8, 4, 6)]:
        chunk.free()
    before = len(system.calls)
    chunk = pool.take(asked * KIB)
    assert chunk.bytes.numel() == (given or asked) * KIB
    assert len(system.calls) - before == (given is None)
    assert system.ledger.idle(Tier.HOST) == (18 - (given or 0)) * KIB
    other = pool.take(asked * KIB)
    assert other.bytes.data_ptr() != chunk.bytes.data_ptr()  # one holder at a time
    pool.close()
    assert system.held == system.ledger.held(Tier.HOST) == chunk.actual_bytes + other.actual_bytes
    chunk.free()
    other.free()
    assert system.held == system.ledger.held(Tier.HOST) == 0
    with pytest.raises(ValueError, match="closed"):
        pool.take(KIB)


@pytest.mark.parametrize("refuses", ["budget", "system"])
def test_idle_memory_is_given_up_if_room_is_needed(refuses: str, monkeypatch: pytest.MonkeyPatch):
    ledger = Ledger(MemoryBudget(host=20 * KIB if refuses == "budget" else None))
    system = System(ledger, most=20 * KIB)
    pool = pool_over(system, monkeypatch)
    taken = [pool.take(size * KIB) for size in (6, 4, 8)]
    with pytest.raises((TierCapacityError, PinError)):
        pool.take(3 * KIB)
    taken[0].free()
    taken[1].free()
    held = pool.take(3 * KIB)  # in place of the smaller one
    assert (system.held, system.ledger.idle(Tier.HOST)) == (17 * KIB, 6 * KIB)
    taken[2].free()
    whole = pool.take(17 * KIB)
    assert (system.held, system.ledger.idle(Tier.HOST)) == (20 * KIB, 0)
    ledger.check_integrity()
    held.free()
    del whole  # as good as its `free`
    assert ledger.held(Tier.HOST) == ledger.idle(Tier.HOST) == system.held == 20 * KIB


# ---- calls ----

CALL: dict[str, Any] = {"max_new_tokens": 32, "steps": 4, "block_length": 16, "stop_at_eos": False}


@pytest.fixture(scope="module")
def model() -> LLaDA:
    torch.manual_seed(0)
    config = {
        "d_model": 96, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 128, "vocab_size": 512,
        "embedding_size": 512, "max_sequence_length": 2048, "mask_token_id": 511, "eos_token_id": 510,
        "pad_token_id": 509, "model_type": "llada",
    }  # fmt: skip
    made = LLaDA.from_config(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return made


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 500, (1, length), generator=torch.Generator().manual_seed(length))


def runtime_of(model: LLaDA, budget: MemoryBudget = UNCAPPED, **options: Any) -> Runtime:
    return Runtime(model, policy=make_policy("polestar", **options), ledger=Ledger(budget))


def planned(runtime: Runtime, context: int, budget: MemoryBudget = UNCAPPED) -> Mapping[Tier, int]:
    """Bytes beside the weights, which these ledgers do not have."""
    sizes = runtime._call.sizes(1, context, CALL["block_length"])
    accounts = Workload(runtime.policy, sizes).needed(budget).tiers(budget)
    return {tier: sum(amounts.values()) for tier, amounts in accounts.items()}


@pytest.mark.parametrize("where", ["host", "streamed"])
def test_a_second_call_obtains_nothing(model: LLaDA, where: str, pinned: list[int]):
    policy: dict[str, Any] = {"clusters": 24, "codec": "raw", "top_m": 2, "update_threshold": 0}
    whole = planned(runtime_of(model, **policy), 332)
    budget = {
        "host": MemoryBudget(host=whole[Tier.HOST]),
        "streamed": MemoryBudget(device=whole[Tier.DEVICE] - 40 * KIB),
    }[where]
    with runtime_of(model, budget, **policy) as runtime:
        first = runtime.generate(ids(300), **CALL)
        obtained = len(pinned)
        assert obtained and runtime.ledger.accounts(Tier.HOST) == {Account.SPARE: runtime.ledger.idle(Tier.HOST)}
        other = runtime.with_policy(runtime.policy)
        for again in (runtime, other):
            assert torch.equal(again.generate(ids(300), **CALL).sequences, first.sequences)
        assert len(pinned) == obtained
        assert runtime.ledger.held(Tier.HOST) == sum(pinned)
        runtime.ledger.check_integrity()
    assert not any(runtime.ledger.held(tier) for tier in Tier)


def test_a_call_that_fits_runs_whatever_ran_before(model: LLaDA, pinned: list[int]):
    """Memory in pieces of other sizes is used, or given up for what is needed; the cap holds at every time."""
    policies: list[dict[str, Any]] = [
        {"clusters": 24, "codec": "raw"},
        {"clusters": 3, "codec": "fp8"},
        {"clusters": "auto"},
    ]
    lengths = (100, 700, 60, 1500, 300)
    alone: dict[tuple[int, int], torch.Tensor] = {}
    most = 0
    for number, policy in enumerate(policies):
        for length in lengths:
            runtime = runtime_of(model, **policy)
            most = max(most, planned(runtime, length + 32)[Tier.HOST])
            alone[number, length] = runtime.generate(ids(length), **CALL).sequences
    budget = MemoryBudget(host=most)
    with runtime_of(model, budget) as runtime:
        for number, policy in enumerate(policies):
            for length in lengths:
                out = runtime.with_policy("polestar", **policy).generate(ids(length), **CALL)
                assert torch.equal(out.sequences, alone[number, length])
                assert out.memory.tiers[Tier.HOST].peak <= most
                runtime.ledger.check_integrity()


def test_a_call_that_fails_gives_its_memory_back(model: LLaDA, pinned: list[int], monkeypatch: pytest.MonkeyPatch):
    runtime = runtime_of(model, update_threshold=0)
    with monkeypatch.context() as patch:
        patch.setattr(StoredRows, "read", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runtime.generate(ids(300), **CALL)
    assert runtime.ledger.held(Tier.HOST) == runtime.ledger.idle(Tier.HOST) == sum(pinned) > 0
    out = runtime.generate(ids(300), **CALL)
    obtained = len(pinned)
    assert torch.equal(runtime_of(model, update_threshold=0).generate(ids(300), **CALL).sequences, out.sequences)
    assert obtained == len(pinned) - obtained  # as many as a call that came first


class Stubborn(SimulatedThreads):
    """Slow, and it cannot be closed."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.events: list[TransferEvent] = []
        super().__init__(delay=lambda point, lane: 0.0 if lane is None else self._held_up())

    def copy(self, *args: Any, **options: Any) -> TransferEvent:
        self.events.append(super().copy(*args, **options))
        return self.events[-1]

    def close(self) -> None:
        raise TransferError("it will not be closed")

    def _held_up(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            self.go.wait(20)
        return 0.0


@pytest.mark.parametrize("interrupted", [False, True])
def test_memory_comes_back_once_nothing_writes_it(interrupted: bool, monkeypatch: pytest.MonkeyPatch):
    """The first write into returned memory waits for nothing, so memory returns after its last copy. That holds if the
    transport fails, or an interrupt comes."""
    ledger, transport, done = Ledger(), Stubborn(), list[bool]()
    pool, back = HostPool(ledger, CPU), HostPool._back
    tiers = Tiers(ledger, device=CPU, transport=transport, pool=pool)

    def noted(self: HostPool, chunk: Chunk) -> None:
        done.extend(event.done() for event in transport.events)
        back(self, chunk)

    def impatient() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HostPool, "_back", noted)
    store(tiers, 1.0)
    if interrupted:
        monkeypatch.setattr(tiers.traffic, "synchronize", impatient)
    threading.Timer(0.2, transport.go.set).start()
    with pytest.raises((TransferError, KeyboardInterrupt)):
        tiers.close()
    assert done == [True]
    assert ledger.accounts(Tier.HOST) == {Account.SPARE: pool.idle_bytes} and not ledger.held(Tier.DEVICE)
    SimulatedThreads.close(transport)
    pool.close()
    assert not ledger.held(Tier.HOST)


def test_calls_at_a_time_hold_memory_of_their_own():
    ledger = Ledger()
    pool = HostPool(ledger, CPU)
    with Tiers(ledger, device=CPU, pool=pool) as one, Tiers(ledger, device=CPU, pool=pool) as other:
        early, late = store(one, 1.0), store(other, 2.0)
        other.synchronize()
        for rows, value in ((early, 1.0), (late, 2.0)):
            out = torch.empty(4, 8)
            rows.read(0, CLUSTER, out, [slice(0, 4)])
            assert out.unique().tolist() == [value]
    assert ledger.held(Tier.HOST) == pool.idle_bytes == 2 * ROWS.room
    with Tiers(ledger, device=CPU, pool=pool) as again:
        store(again, 3.0)
        assert ledger.held(Tier.HOST) == 2 * ROWS.room
    pool.close()


def store(tiers: Tiers, value: float) -> StoredRows:
    """One cluster of one layer, in host memory."""
    rows = StoredRows(tiers, ROWS, 1)
    rows.store(0, CLUSTER, torch.full((4, 8), value), torch.zeros(1, 8))
    return rows
