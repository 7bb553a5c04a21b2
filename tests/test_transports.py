"""One contract for all transports. A row in `RIGS` adds a transport."""

import gc
import os
import random
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulation import Point, SimulatedCuda, SimulatedThreads, compute
from torch import Tensor

from tiered.offload.chunk import device_chunks
from tiered.offload.cuda_event import CudaEvent
from tiered.offload.cuda_transport import CudaTransport
from tiered.offload.errors import CorruptRecordError, TransferError
from tiered.offload.fence import Event, Fence, Region
from tiered.offload.host_event import HostEvent
from tiered.offload.lane_thread import Job, LaneThread
from tiered.offload.ring import Ring
from tiered.offload.thread_transport import LaneTransport, ThreadTransport
from tiered.offload.transport import Copy, Lane, Settled, TransferEvent, Transport

SIZE = 64
COPY_LANES = (Lane.FETCH, Lane.STORE)
PATIENCE = 20.0  # seconds until a test says that something hangs
MOMENT = 0.05  # long enough for a job that wrongly does not wait to run


class Gate:
    """An event that a test ends when it likes."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._failure: str | None = None

    def open(self, failure: str | None = None) -> None:
        self._failure = failure
        self._open.set()

    def done(self) -> bool:
        return self._open.is_set()

    def synchronize(self) -> None:
        assert self._open.wait(PATIENCE), "a gate that nobody opened"
        if self._failure is not None:
            raise TransferError(self._failure)


@dataclass
class FakeMark:
    """A CUDA event that knows which stream recorded it, and when."""

    stream: str | None = None
    at: int | None = None

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: "FakeStream") -> None:
        stream.log.append(("record", stream.name, id(self)))
        self.stream, self.at = stream.name, time.monotonic_ns()

    def query(self) -> bool:
        assert self.at is not None, "the query of an event that was never recorded"
        return True

    def synchronize(self) -> None:
        assert self.query()
        FakeStream.log.append(("host waits", str(self.stream), id(self)))

    def elapsed_time(self, other: "FakeMark") -> float:
        assert self.at is not None and other.at is not None
        return (other.at - self.at) / 1e6


class FakeStream:
    """A CUDA stream on which everything is over as soon as it is issued, so that the host's part alone is tested."""

    log: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, device: object = None, priority: int = 0, name: str = "side") -> None:
        self.name = f"{name} {id(self)}"

    def wait_event(self, event: FakeMark) -> None:
        assert event.at is not None, "to wait for an event that is not recorded yet is not to wait"
        self.log.append(("wait", self.name, id(event)))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.name, 0))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """torch.cuda's streams and events, faked; returns the log of their calls."""
    log: list[tuple[str, str, int]] = []
    monkeypatch.setattr(FakeStream, "log", log)
    current = FakeStream(name="current")

    @contextmanager
    def stream(_: FakeStream) -> Iterator[None]:
        yield

    for name, fake in {
        "Stream": FakeStream,
        "Event": FakeMark,
        "current_stream": lambda _: current,
        "stream": stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return log


def jitter(_: Point, __: Lane | None) -> float:
    """Seconds by which the transport with delays is held up."""
    return random.choice([0.0, 0.0, 0.0005])


@dataclass
class Rig:
    """A transport under test, and the memory that it copies between."""

    make: Callable[[], Transport]
    device: str = "cpu"
    made: list[Transport] = field(default_factory=list)

    def transport(self) -> Transport:
        self.made.append(self.make())
        return self.made[-1]

    def host(self, value: int = 0, size: int = SIZE) -> Tensor:
        return torch.full((size,), value, dtype=torch.uint8, pin_memory=self.device == "cuda")

    def on_device(self, value: int = 0, size: int = SIZE) -> Tensor:
        filled = torch.full((size,), value, dtype=torch.uint8, device=self.device)
        if self.device == "cuda":
            torch.cuda.synchronize()  # the fill is on a stream that no job of a test waits for
        return filled

    def ends(self, lane: Lane) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Makers of a source and a destination for `lane`."""
        return {Lane.FETCH: (self.host, self.on_device), Lane.STORE: (self.on_device, self.host)}.get(
            lane, (self.host, self.host)
        )


RIGS: dict[str, Callable[[], Rig]] = {
    "thread": lambda: Rig(ThreadTransport),
    "compute_thread": lambda: Rig(partial(SimulatedThreads, compute_thread=True)),
    "delays": lambda: Rig(partial(SimulatedThreads, compute_thread=True, delay=jitter)),
    "fake_cuda": lambda: Rig(lambda: CudaTransport(torch.device("cpu"))),
    "cuda": lambda: Rig(lambda: CudaTransport(torch.device("cuda")), device="cuda"),
}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else []) for name in RIGS])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "fake_cuda":
        request.getfixturevalue("fake_cuda")
    gc.collect()  # runtimes that tests before this one dropped still have their threads
    waited_until(lambda: not lane_threads())
    rig = RIGS[request.param]()
    yield rig
    for transport in rig.made:
        transport.close()
    assert not lane_threads()


@pytest.fixture
def transport(rig: Rig) -> Transport:
    return rig.transport()


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tiered ")]


def end(*events: Event) -> None:
    for event in events:
        event.synchronize()


def failure(event: Event, names: str | None = None) -> TransferError:
    with pytest.raises(TransferError, match=names) as caught:
        event.synchronize()
    assert event.done()
    return caught.value


def nothing() -> int:
    return 0


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


# --- jobs


@pytest.mark.parametrize("lane", Lane)
def test_a_copy_moves_every_piece(rig: Rig, transport: Transport, lane: Lane):
    make_source, make_destination = rig.ends(lane)
    pieces = [Copy(make_source(i + 1, 10 * i + 1), make_destination(0, 10 * i + 1)) for i in range(4)]
    before = time.monotonic_ns()
    event = transport.copy(lane, pieces)
    end(event)
    assert [piece.destination.tolist() for piece in pieces] == [[i + 1] * (10 * i + 1) for i in range(4)]
    assert (event.lane, event.nbytes, event.failed, event.done()) == (lane, 64, False, True)
    times = event.times
    assert times.started is not None and times.ended is not None
    # The device's clock is placed on the host's with some error.
    assert before - 10**6 <= times.submitted <= times.started + 10**6
    assert times.started <= times.ended <= time.monotonic_ns() + 10**6


def test_pieces_are_copied_in_order(rig: Rig, transport: Transport):
    destination = rig.on_device()
    end(transport.copy(Lane.FETCH, [Copy(rig.host(value), destination) for value in range(1, 9)]))
    assert destination.tolist() == [8] * SIZE


@given(st.integers(0, 100), st.integers(1, 30))
def test_pieces_are_the_whole_copy_in_order(size: int, piece: int):
    whole = Copy(torch.arange(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8))
    found = list(whole.pieces(piece))
    assert torch.cat([each.source for each in found]).equal(whole.source)
    assert len(found) == max(1, size // piece)
    assert all(piece <= each.source.numel() < 2 * piece for each in found) or size < piece
    for each in found:
        each.destination.copy_(each.source)
    assert whole.destination.equal(whole.source)


@pytest.mark.parametrize("lane", Lane)
def test_a_large_copy_moves_in_pieces_and_is_one_job(rig: Rig, transport: Transport, lane: Lane):
    assert isinstance(transport, LaneTransport)
    make_source, make_destination = rig.ends(lane)
    source, destination = make_source(), make_destination()
    source.copy_(torch.arange(SIZE, dtype=torch.uint8))
    if rig.device == "cuda":
        torch.cuda.synchronize()
    transport.piece_bytes = 10
    event = transport.copy(lane, [Copy(source, destination)])
    end(event)
    assert destination.tolist() == list(range(SIZE)) and event.nbytes == SIZE


def test_no_pieces(transport: Transport):
    event = transport.copy(Lane.FETCH, [])
    end(event)
    assert event.nbytes == 0


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.SAVE])
def test_run(transport: Transport, lane: Lane):
    gate, ran_in = Gate(), []

    def work() -> int:
        ran_in.append(threading.current_thread())
        return 77

    event = transport.run(lane, work, after=[gate])
    assert (event.nbytes, event.times.started, event.times.ended) == (0, None, None)
    gate.open()
    end(event)
    assert (event.lane, event.nbytes) == (lane, 77)
    assert ran_in != [threading.current_thread()]


@pytest.mark.parametrize("lane", COPY_LANES)
def test_work_of_the_host_has_its_lanes(transport: Transport, lane: Lane):
    with pytest.raises(ValueError, match=f"lane {lane}; allowed: load, save"):
        transport.run(lane, nothing)


def test_compute(rig: Rig, transport: Transport):
    state = rig.on_device(3)
    event = compute(transport, lambda: state.mul_(5))
    end(event)
    assert state.tolist() == [15] * SIZE
    assert (event.lane, event.nbytes, event.failed) == (None, 0, False)
    assert event.times.ended is not None


# --- order


@pytest.mark.parametrize("lane", Lane)
def test_a_copy_never_blocks_and_waits_for_earlier_jobs(rig: Rig, transport: Transport, lane: Lane):
    make_source, make_destination = rig.ends(lane)
    source, destination, gate = make_source(1), make_destination(0), Gate()
    event = transport.copy(lane, [Copy(source, destination)], after=[gate])
    time.sleep(MOMENT)
    assert not event.done() and not event.failed
    assert (event.times.started, event.times.ended) == (None, None)
    assert destination.tolist() == [0] * SIZE
    gate.open()
    end(event)
    assert destination.tolist() == [1] * SIZE


@pytest.mark.parametrize("lane", COPY_LANES)
def test_a_lane_keeps_its_order(rig: Rig, transport: Transport, lane: Lane):
    """A job that could run at once stays behind one that has to wait."""
    make_source, make_destination = rig.ends(lane)
    destination, gate = make_destination(0), Gate()
    first = transport.copy(lane, [Copy(make_source(1), destination)], after=[gate])
    later = [transport.copy(lane, [Copy(make_source(value), destination)]) for value in range(2, 6)]
    time.sleep(MOMENT)
    assert not any(event.done() for event in [first, *later])
    gate.open()
    end(later[-1])
    assert first.done() and all(event.done() for event in later)
    assert destination.tolist() == [5] * SIZE


def test_work_keeps_its_order(transport: Transport):
    gate, order = Gate(), []

    def work(number: int) -> int:
        order.append(number)
        return number

    events = [transport.run(Lane.SAVE, partial(work, 0), after=[gate])]
    events += [transport.run(Lane.SAVE, partial(work, number)) for number in range(1, 20)]
    gate.open()
    end(events[-1])
    assert order == list(range(20))


def test_a_lane_does_not_wait_for_another(rig: Rig, transport: Transport):
    gate = Gate()
    held = transport.run(Lane.LOAD, nothing, after=[gate])
    others = [transport.copy(lane, [Copy(rig.ends(lane)[0](), rig.ends(lane)[1]())]) for lane in COPY_LANES]
    end(transport.run(Lane.SAVE, nothing), transport.wait(), *others)
    assert not held.done()
    gate.open()
    end(held)


def test_lanes_wait_for_each_other(rig: Rig, transport: Transport):
    """disk → host → device → compute → device → host → disk, each after the one before, all handed over at once."""
    disk, here, there = rig.host(1), [rig.host(), rig.host(), rig.host()], rig.on_device()
    gate = Gate()

    def load() -> int:
        here[0].copy_(disk)
        return SIZE

    def save() -> int:
        here[2].copy_(here[1])
        return SIZE

    loaded = transport.run(Lane.LOAD, load, after=[gate])
    fetched = transport.copy(Lane.FETCH, [Copy(here[0], there)], after=[loaded])
    opener = threading.Timer(MOMENT, gate.open)
    opener.start()
    computed = compute(transport, lambda: there.mul_(7), after=[fetched])
    stored = transport.copy(Lane.STORE, [Copy(there, here[1])], after=[computed])
    end(transport.run(Lane.SAVE, save, after=[stored]))
    opener.join()
    assert here[2].tolist() == [7] * SIZE


def test_the_wait_of_compute_is_in_its_times(rig: Rig, transport: Transport):
    gate = Gate()
    loaded = transport.run(Lane.LOAD, nothing, after=[gate])
    opener = threading.Timer(MOMENT, gate.open)
    opener.start()
    event = transport.wait(after=[loaded])
    end(event)
    opener.join()
    assert event.times.started is not None
    assert event.times.started - event.times.submitted > MOMENT / 2 * 1e9


# --- failures


@dataclass(frozen=True)
class Failing:
    """A job that fails, and the words in its error."""

    submit: Callable[[Rig, Transport, Sequence[Event]], TransferEvent]
    names: str
    cause: type[BaseException]


def failing_copy(source: Callable[[Rig], Tensor], destination: Callable[[Rig], Tensor], names: str) -> Failing:
    return Failing(
        lambda rig, transport, after: transport.copy(
            Lane.FETCH, [Copy(rig.host(1), rig.on_device()), Copy(source(rig), destination(rig))], after
        ),
        names,
        ValueError,
    )


FAILING = {
    "longer": failing_copy(lambda rig: rig.host(size=5), lambda rig: rig.on_device(size=4), "5 bytes into 4 bytes"),
    "broadcast": failing_copy(lambda rig: rig.host(size=1), lambda rig: rig.on_device(), "1 bytes into 64 bytes"),
    "strided": failing_copy(lambda rig: rig.host()[::2], lambda rig: rig.on_device(size=32), r"source .* \(2,\)"),
    "typed": failing_copy(lambda rig: rig.host(), lambda rig: rig.on_device().float(), "destination .*float32"),
    "shaped": failing_copy(lambda rig: rig.host().view(8, 8), lambda rig: rig.on_device(), r"source .* \(8, 8\)"),
    "work": Failing(
        lambda rig, transport, after: transport.run(Lane.LOAD, raising(CorruptRecordError("record 7")), after),
        "CorruptRecordError.*record 7",
        CorruptRecordError,
    ),
    "wait": Failing(
        lambda rig, transport, after: transport.wait([*after, failed_gate()]),
        "the gate broke",
        TransferError,
    ),
    "event": Failing(
        lambda rig, transport, after: transport.copy(Lane.STORE, [], after=[*after, failed_gate()]),
        "the gate broke",
        TransferError,
    ),
}


def failed_gate() -> Gate:
    gate = Gate()
    gate.open("the gate broke")
    return gate


@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING)
def test_a_failure_is_that_of_its_job_and_its_dependents(rig: Rig, transport: Transport, failing: Failing):
    untouched, ran = [rig.on_device(9), rig.host(9)], []
    failed = failing.submit(rig, transport, [])
    fetch = transport.copy(Lane.FETCH, [Copy(rig.host(1), untouched[0])], after=[failed])
    store = transport.copy(Lane.STORE, [Copy(rig.on_device(1), untouched[1])], after=[fetch])
    run = transport.run(Lane.SAVE, lambda: ran.append(1) or 0, after=[store])
    computed = compute(transport, lambda: ran.append(2), after=[run])
    healthy = rig.on_device()
    end(transport.copy(Lane.FETCH, [Copy(rig.host(2), healthy)]))
    assert healthy.tolist() == [2] * SIZE
    for event in (failed, fetch, store, run, computed):
        error = failure(event, failing.names)
        assert event.failed
        assert isinstance(error.__cause__, failing.cause)
        assert error is not failure(event)  # one that is raised again and again would grow
    assert "not started" in str(failure(computed)) and "not started" in str(failure(fetch))
    assert [buffer.tolist() for buffer in untouched] == [[9] * SIZE] * 2
    assert not ran


@pytest.mark.parametrize("failing", ["longer", "typed"])
def test_a_refused_piece_leaves_the_others_alone(rig: Rig, transport: Transport, failing: str):
    destination = rig.on_device(9)
    wrong = (
        Copy(rig.host(), rig.on_device(size=4)) if failing == "longer" else Copy(rig.host().float(), rig.on_device())
    )
    failure(transport.copy(Lane.FETCH, [Copy(rig.host(1), destination), wrong]))
    assert destination.tolist() == [9] * SIZE


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.STORE, Lane.LOAD])
@pytest.mark.parametrize("order", ["failure first", "failure last"])
def test_a_job_that_fails_ends_after_all_that_it_waits_for(rig: Rig, transport: Transport, lane: Lane, order: str):
    """A fence holds the last writer alone. If it ended while an earlier reader goes on, the next writer would race."""
    gate = Gate()
    after = [failed_gate(), gate] if order == "failure first" else [gate, failed_gate()]
    make_source, make_destination = rig.ends(lane)
    event = transport.copy(lane, [Copy(make_source(), make_destination())], after)
    time.sleep(MOMENT)
    assert not event.done()
    gate.open()
    failure(event)


def test_settled_ends_with_its_event_and_never_fails(rig: Rig, transport: Transport):
    gate, destination = Gate(), rig.on_device()
    failed = transport.copy(Lane.STORE, [], after=[gate])
    settled = Settled(Settled(failed))
    event = transport.copy(Lane.FETCH, [Copy(rig.host(1), destination)], after=[settled])
    time.sleep(MOMENT)
    assert not settled.done() and not event.done()
    gate.open("the gate broke")
    end(settled, event)
    failure(failed)
    assert destination.tolist() == [1] * SIZE


@pytest.mark.parametrize("death", [SystemExit("killed"), KeyboardInterrupt("killed")])
def test_a_dead_thread_fails_its_lane_and_no_other(rig: Rig, transport: Transport, death: BaseException):
    gate, ran = Gate(), []
    killed = transport.run(Lane.LOAD, raising(death), after=[gate])
    pending = transport.run(Lane.LOAD, lambda: ran.append(1) or 0)
    dependent = transport.copy(Lane.FETCH, [Copy(rig.host(1), rig.on_device())], after=[pending])
    gate.open()
    failure(killed, "killed")
    failure(pending, "the thread of tiered load died: .*killed.*; make a new transport")
    failure(dependent, "killed")
    still = Gate()
    later = transport.run(Lane.LOAD, lambda: ran.append(2) or 0, after=[still])
    end(transport.run(Lane.SAVE, nothing), transport.copy(Lane.FETCH, [Copy(rig.host(1), rig.on_device())]))
    assert not later.done()  # its fence relies on that
    still.open()
    failure(later, "the thread of tiered load died")
    assert not ran


@pytest.mark.usefixtures("fake_cuda")
def test_threads_of_lanes_compute_on_the_device_of_the_transport(monkeypatch: pytest.MonkeyPatch):
    """A CUDA call of a new thread would open a context on the first GPU, and fail if that has no room."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr("tiered.offload.cuda_transport.pick_device", torch.device)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    transport = CudaTransport(torch.device("cuda:1"))
    for lane in (Lane.LOAD, Lane.SAVE, Lane.LOAD):
        end(transport.run(lane, nothing))
    transport.close()
    assert chosen == [("tiered load", torch.device("cuda:1")), ("tiered save", torch.device("cuda:1"))]


def test_a_thread_that_cannot_begin_is_dead():
    lane = LaneThread("tiered load", raising(RuntimeError("no such device")))
    event = HostEvent(Lane.LOAD)
    lane.submit(Job(event, nothing, ()))
    failure(event, "the thread of tiered load died: .*no such device")
    lane.stop()
    lane.join()


# --- the life of a transport


def test_close_waits_and_is_the_end(rig: Rig, transport: Transport):
    gate, destination = Gate(), rig.on_device()
    loaded = transport.run(Lane.LOAD, nothing, after=[gate])
    fetched = transport.copy(Lane.FETCH, [Copy(rig.host(1), destination)], after=[loaded])
    opener = threading.Timer(MOMENT, gate.open)
    opener.start()
    transport.close()
    assert loaded.done() and fetched.done() and not fetched.failed
    assert destination.tolist() == [1] * SIZE
    assert not lane_threads()
    opener.join()
    transport.close()
    for use in (
        lambda: transport.copy(Lane.FETCH, []),
        lambda: transport.run(Lane.LOAD, nothing),
        lambda: transport.wait(),
    ):
        with pytest.raises(TransferError, match="closed; make a new transport"):
            use()
    end(loaded, fetched)


def test_close_with_a_failure_under_way(transport: Transport):
    gate = Gate()
    event = transport.copy(Lane.STORE, [], after=[gate])
    threading.Timer(MOMENT, gate.open, ["the gate broke"]).start()
    transport.close()
    failure(event, "the gate broke")


def test_a_dropped_transport_leaves_no_threads(rig: Rig):
    transport = rig.make()
    end(transport.run(Lane.LOAD, nothing), transport.run(Lane.SAVE, nothing))
    assert len(lane_threads()) == 2
    del transport
    gc.collect()
    waited_until(lambda: not lane_threads())


def waited_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_finished_job_lets_go_of_everything(rig: Rig, transport: Transport):
    """Also while its lane has nothing else to do, and while its event lives on."""

    class Witness(Gate):
        pass

    source, witness = rig.host(1), Witness()
    witness.open()
    held = [weakref.ref(source), weakref.ref(witness)]
    events = [transport.copy(Lane.LOAD, [Copy(source, rig.host())], after=[witness])]
    events += [transport.run(Lane.SAVE, lambda source=source: source.numel(), after=[witness])]
    end(*events)
    del source, witness
    waited_until(lambda: all(reference() is None for reference in held))


@pytest.mark.parametrize("rig", ["thread", "compute_thread", "fake_cuda"], indirect=True)
def test_two_thousand_jobs(rig: Rig, transport: Transport):
    """Each waits for the one before; neither threads nor memory grow, and the last of them still moves the bytes."""
    host, device = [rig.host(1, 16), rig.host(0, 16)], rig.on_device(0, 16)

    def round_trips(jobs: int) -> None:
        event: Sequence[Event] = ()
        for _ in range(jobs // 4):
            event = [transport.copy(Lane.FETCH, [Copy(host[0], device)], after=event)]
            event = [compute(transport, lambda: device.add_(1), after=event)]
            event = [transport.copy(Lane.STORE, [Copy(device, host[1])], after=event)]
            event = [transport.run(Lane.SAVE, nothing, after=event)]
        end(*event)
        gc.collect()

    round_trips(400)
    threads, blocks = len(lane_threads()), sys.getallocatedblocks()
    round_trips(2_000)
    assert len(lane_threads()) == threads <= 4
    FakeStream.log.clear()
    assert sys.getallocatedblocks() - blocks < 400
    assert host[1].tolist() == [2] * 16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_errors(rig: Rig, transport: Transport):
    gate, destination = Gate(), rig.on_device()
    pending = transport.run(Lane.LOAD, nothing, after=[gate])
    fetched = transport.copy(Lane.FETCH, [Copy(rig.host(1), destination)], after=[pending])

    def outcome(use: Callable[[], Any]) -> str:
        try:
            return f"returned {use()}"
        except TransferError as error:
            return f"TransferError {error}"
        except BaseException as error:
            return repr(error)

    def in_child() -> str:
        uses: list[Callable[[], Any]] = [
            lambda: transport.copy(Lane.FETCH, []),
            lambda: transport.run(Lane.LOAD, nothing),
            lambda: transport.wait(),
            fetched.synchronize,
            Settled(pending).synchronize,
            lambda: (pending.done(), pending.failed, fetched.done(), fetched.failed),
            transport.close,
            transport.close,
        ]
        return "\n".join(outcome(use) for use in uses)

    heard = said_by_child(in_child)
    assert all("threads do not survive a fork" in line and line.startswith("TransferError") for line in heard[:4])
    assert all("make a new transport in this process" in line for line in heard[:3])
    assert heard[4:] == ["returned None", "returned (True, True, True, True)", "returned None", "returned None"]
    gate.open()
    end(fetched)
    assert destination.tolist() == [1] * SIZE


def said_by_child(speak: Callable[[], str]) -> list[str]:
    """The lines of what `speak` returns in a forked child; it has `PATIENCE` seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.write(writer, speak().encode())
        os._exit(0)
    os.close(writer)
    try:
        assert select.select([reader], [], [], PATIENCE)[0], "the child hangs"
        return os.read(reader, 1 << 16).decode().splitlines()
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# --- calls of a CUDA device, as a faked one gets them


@pytest.fixture
def on_fakes(fake_cuda: list[tuple[str, str, int]]) -> Iterator[Callable[..., CudaTransport]]:
    """Makes CUDA transports on a faked device, with an empty log."""
    with ExitStack() as stack:

        def make(kind: type[CudaTransport] = CudaTransport, **options: Any) -> CudaTransport:
            transport = kind(torch.device("cpu"), **options)
            stack.callback(transport.close)
            fake_cuda.clear()
            return transport

        yield make


def cpu_copy(value: int = 1, size: int = SIZE) -> Copy:
    return Copy(torch.full((size,), value, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8))


def test_streams_wait_for_streams(on_fakes: Callable[..., CudaTransport], fake_cuda: list[tuple[str, str, int]]):
    """Not the host: every wait is asked for on the stream that has to wait, between its arrival and its work."""
    transport = on_fakes()
    encoded = transport.wait()
    stored = transport.copy(Lane.STORE, [cpu_copy()], after=[encoded])
    fetched = transport.copy(Lane.FETCH, [cpu_copy()], after=[Settled(Settled(stored))])
    transport.wait(after=[fetched, encoded])
    current, store, fetch = fake_cuda[0][1], fake_cuda[4][1], fake_cuda[7][1]
    assert len({current, store, fetch}) == 3
    starts = [id(event.start) for event in (encoded, stored, fetched) if isinstance(event, CudaEvent)]
    ends = [id(event.end) for event in (encoded, stored, fetched) if isinstance(event, CudaEvent)]
    assert fake_cuda[1:3] == [("record", current, starts[0]), ("record", current, ends[0])]
    assert fake_cuda[3:6] == [("wait", store, ends[0]), ("record", store, starts[1]), ("record", store, ends[1])]
    assert fake_cuda[6:9] == [("wait", fetch, ends[1]), ("record", fetch, starts[2]), ("record", fetch, ends[2])]
    assert [entry[:2] for entry in fake_cuda[9:]] == [
        *(("record", current), ("wait", current), ("wait", current), ("record", current), ("record", current))
    ]
    assert [fake_cuda[10][2], fake_cuda[11][2]] == [ends[2], ends[0]]


def test_the_first_copy_into_new_memory_waits_for_the_stream_that_it_was_obtained_on(
    on_fakes: Callable[..., CudaTransport], fake_cuda: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
):
    """Work on that stream may still use the memory. The copy's stream waits, not the host."""
    transport = on_fakes()
    monkeypatch.setattr(FakeMark, "query", lambda mark: False)  # the device lags behind

    def obtained(nbytes: int, **_: object) -> Tensor:
        fake_cuda.append(("obtain", "", 0))
        return torch.zeros(nbytes, dtype=torch.uint8)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", obtained)
        chunks = device_chunks(torch.device("cuda"))
        chunk, other = chunks(2 * SIZE), chunks(SIZE)
    slot = Ring(2, chunk.bytes, Region.FETCH_SLOT, chunk.earlier).acquire()
    assert slot is not None
    assert [kind for kind, _, _ in fake_cuda] == ["obtain", "record"] * 2
    marks = [name for _, _, name in fake_cuda[1::2]]
    for fence in (slot.fence, Fence(Region.DEVICE_SLOT, other.earlier)):
        transport.copy(Lane.FETCH, [cpu_copy()], after=fence.before_write())
    copied = [(kind, mark) for kind, _, mark in fake_cuda[4:] if kind != "record"]
    assert copied == [("wait", mark) for mark in marks]


def test_a_thread_waits_for_jobs_that_the_host_alone_sees(
    on_fakes: Callable[..., CudaTransport], fake_cuda: list[tuple[str, str, int]]
):
    transport, gate = on_fakes(), Gate()
    loaded = transport.run(Lane.LOAD, nothing, after=[gate])
    first = transport.copy(Lane.FETCH, [cpu_copy()], after=[loaded])
    second = transport.copy(Lane.FETCH, [cpu_copy()])  # could go at once, were it not for the order
    stored = transport.copy(Lane.STORE, [cpu_copy()])
    assert stored.done() and not first.done() and not second.done()
    stores = list(fake_cuda)
    gate.open()
    for event in (first, second):
        waited_until(event.done)
        assert not event.failed
    assert fake_cuda[: len(stores)] == stores and len(fake_cuda) == len(stores) + 4


def test_a_copy_that_fails_half_way_ends_when_its_stream_is_quiet(
    on_fakes: Callable[..., CudaTransport], fake_cuda: list[tuple[str, str, int]]
):
    copied = []

    def refuse_the_second(point: Point, lane: Lane | None) -> float:
        if point is Point.COPY:
            copied.append(lane)
            if len(copied) == 2:
                raise RuntimeError("an illegal address")
        return 0.0

    event = on_fakes(kind=SimulatedCuda, delay=refuse_the_second).copy(Lane.FETCH, [cpu_copy(), cpu_copy()])
    assert event.failed and event.done()
    failure(event, "an illegal address")
    assert [kind for kind, _, _ in fake_cuda] == ["record", "synchronize"]


def test_a_large_copy_has_the_marks_of_one(
    on_fakes: Callable[..., CudaTransport], fake_cuda: list[tuple[str, str, int]]
):
    """Six pieces, the last of which takes what is left."""
    copied = []
    transport = on_fakes(kind=SimulatedCuda, delay=lambda point, lane: copied.append(point) or 0.0)
    transport.piece_bytes = 10
    event = transport.copy(Lane.FETCH, [cpu_copy()])
    assert event.done() and not event.failed and event.nbytes == SIZE
    assert copied.count(Point.COPY) == 6 and [kind for kind, _, _ in fake_cuda] == ["record", "record"]


@pytest.mark.parametrize("method", ["query", "synchronize", "record"])
def test_a_lost_device(on_fakes: Callable[..., CudaTransport], monkeypatch: pytest.MonkeyPatch, method: str):
    transport = on_fakes()
    with monkeypatch.context() as lost:
        lost.setattr(FakeMark, method, lambda *_: raising(RuntimeError("device lost"))())
        events = [transport.copy(Lane.FETCH, [cpu_copy()]), transport.wait()]
        for event in events:
            failure(event, "device lost")
            assert event.failed and event.times.started is None


def test_pieces_live_until_they_are_copied(on_fakes: Callable[..., CudaTransport], monkeypatch: pytest.MonkeyPatch):
    """torch gives a dropped tensor's memory to the next one, though another stream still copies it."""
    transport = on_fakes()
    pieces = [cpu_copy(), cpu_copy()]
    held = [weakref.ref(piece.source) for piece in pieces]
    with monkeypatch.context() as busy:
        busy.setattr(FakeMark, "query", lambda _: False)
        while pieces:
            transport.copy(Lane.STORE, [pieces.pop()])
        gc.collect()
        assert all(reference() is not None for reference in held)
    transport.copy(Lane.STORE, [])
    gc.collect()
    assert all(reference() is None for reference in held)


# --- random schedules


def random_schedule(rig: Rig, transport: Transport | None, seed: int, *, unfenced: bool = False) -> list[list[int]]:
    """Forty random copies and computations over six buffers; their final content.

    Without a transport everything happens at once, in order; with one, each waits for what its buffers' fences say.
    """
    chance = random.Random(seed)
    host = [rig.host(i, 16) for i in range(3)]
    device = [rig.on_device(10 + i, 16) for i in range(3)]
    fences = {id(buffer): Fence(Region.HOST_SLOT) for buffer in [*host, *device]}
    for _ in range(40):
        lane = chance.choice([*Lane, None])
        sources, destinations = {
            Lane.FETCH: (host, device),
            Lane.STORE: (device, host),
            Lane.LOAD: (host, host),
            Lane.SAVE: (host, host),
            None: (device, device),
        }[lane]
        source, destination = chance.choice(sources), chance.choice(destinations)
        if source is destination:
            continue
        if lane is None:
            job = lambda source=source, destination=destination: destination.mul_(3).add_(source)  # noqa: E731
        else:
            job = lambda source=source, destination=destination: destination.copy_(source)  # noqa: E731
        if transport is None:
            job()
            continue
        read, written = fences[id(source)], fences[id(destination)]
        after = () if unfenced else (*read.before_read(), *written.before_write())
        if lane is None:
            event = compute(transport, job, after)
        else:
            event = transport.copy(lane, [Copy(source, destination)], after)
        read.reads(event)
        written.writes(event)
    for fence in fences.values():
        end(*fence.before_write())
    return [buffer.tolist() for buffer in [*host, *device]]


def test_fenced_schedules_are_as_if_one_at_a_time(rig: Rig, transport: Transport):
    for seed in range(30):
        assert random_schedule(rig, transport, seed) == random_schedule(rig, None, seed)


@pytest.mark.parametrize("rig", ["delays"], indirect=True)
def test_unfenced_schedules_are_not(rig: Rig, transport: Transport):
    """The control of the test above: without its fences the same schedules go wrong."""
    wrong = 0
    for seed in range(30):
        wrong += random_schedule(rig, transport, seed, unfenced=True) != random_schedule(rig, None, seed)
        end(*(transport.run(lane, nothing) for lane in (Lane.LOAD, Lane.SAVE)))
    assert wrong > 3
