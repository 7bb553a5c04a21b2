"""Threads as a transport: compute beside the caller, inference tensors, and the end of the interpreter."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from simulation import SimulatedThreads, compute
from torch import Tensor

from tiered.offload.errors import TransferError
from tiered.offload.host_event import HostEvent
from tiered.offload.lane_thread import LaneThread
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Copy, Lane, Times, TransferEvent

MOMENT = 0.05
THREADS_OF_THE_SYSTEM = Path("/proc/self/task")


@pytest.fixture(params=[False, True], ids=["inline", "compute_thread"])
def transport(request: pytest.FixtureRequest) -> Iterator[ThreadTransport]:
    transport = SimulatedThreads(compute_thread=True) if request.param else ThreadTransport()
    yield transport
    transport.close()


def slowly_filled(transport: ThreadTransport, buffer: Tensor, value: float) -> TransferEvent:
    """The event of a load that takes a while."""

    def work() -> int:
        time.sleep(MOMENT)
        buffer.fill_(value)
        return buffer.nbytes

    return transport.run(Lane.LOAD, work)


def doubled(source: Tensor, result: Tensor) -> Callable[[], None]:
    def work() -> None:
        torch.mul(source, 2, out=result)

    return work


def ns(times: Times) -> tuple[int, int, int]:
    assert times.started is not None and times.ended is not None
    return times.submitted, times.started, times.ended


@pytest.mark.parametrize("transport", [True], indirect=True)
def test_a_copy_that_does_not_wait_is_stale(transport: ThreadTransport):
    """The control: asynchrony is real, so a missing wait shows in a result."""
    source, result = torch.zeros(8), torch.zeros(8)
    loaded = slowly_filled(transport, source, 5)
    event = compute(transport, doubled(source, result), after=[loaded])
    stale = transport.copy(Lane.FETCH, [Copy(as_bytes(source), as_bytes(torch.zeros(8)))])
    assert result.tolist() == [0] * 8 and not event.done()  # the caller went on, nothing is there yet
    stale.synchronize()
    assert not loaded.done()  # and a copy that waits for nothing has read the earlier numbers
    event.synchronize()
    assert result.tolist() == [10] * 8


@pytest.mark.parametrize("transport", [False], indirect=True)
def test_a_wait_returns_when_the_load_is_there(transport: ThreadTransport):
    source = torch.zeros(8)
    event = transport.wait([slowly_filled(transport, source, 5)])
    assert event.done() and source.tolist() == [5] * 8
    submitted, started, _ = ns(event.times)
    assert started - submitted > MOMENT / 2 * 1e9  # exposed


@pytest.mark.parametrize("transport", [False], indirect=True)
def test_a_wait_lets_an_interrupt_through(transport: ThreadTransport):
    """It is the caller's thread that Ctrl-C hits, and no lane dies of it."""

    class Interrupted(HostEvent):
        def synchronize(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transport.wait([Interrupted(None)])
    assert not transport.wait().failed


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def test_inference_tensors_can_be_copied(transport: ThreadTransport):
    """The model's buffers are made in inference mode; a thread that is not in it may not write them."""
    with torch.inference_mode():
        source, destination = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    transport.copy(Lane.FETCH, [Copy(source, destination)]).synchronize()
    assert destination.tolist() == [1] * 8


def test_an_end_is_final():
    """A thread that is interrupted between two jobs fails all of its jobs, the ended one among them."""
    ended, failed = HostEvent(Lane.FETCH, 4), HostEvent(Lane.FETCH, 4)
    ended.end(4)
    failed.fail("first", OSError())
    for event in (ended, failed):
        event.fail("second", OSError())
    ended.synchronize()
    assert not ended.failed
    with pytest.raises(TransferError, match="fetch of 4 bytes: first"):
        failed.synchronize()


def test_lanes_run_at_the_same_time(transport: ThreadTransport):
    """Each of two works ends only once the other has begun."""
    meeting = threading.Barrier(2, timeout=20)
    events = [transport.run(lane, lambda: meeting.wait() * 0) for lane in (Lane.LOAD, Lane.SAVE)]
    for event in events:
        event.synchronize()


@pytest.mark.skipif(not THREADS_OF_THE_SYSTEM.is_dir(), reason="the system does not list its threads")
def test_a_lane_copies_in_one_thread():
    """A parallel operation of torch would leave a team of threads behind in each lane, and they outnumber the cores."""
    before, transport = torch.get_num_threads(), ThreadTransport()
    torch.set_num_threads(4)
    try:
        source, destination = torch.ones(2, 1 << 20, dtype=torch.uint8)  # by the team of the caller
        there = len(list(THREADS_OF_THE_SYSTEM.iterdir()))
        for lane in Lane:
            transport.copy(lane, [Copy(source, destination)]).synchronize()
        assert len(list(THREADS_OF_THE_SYSTEM.iterdir())) <= there + len(Lane)
    finally:
        transport.close()
        torch.set_num_threads(before)


def test_many_callers(transport: ThreadTransport):
    """Every job of every caller is run once."""
    ran: list[tuple[int, int]] = []

    def call(caller: int) -> None:
        events = [transport.run(Lane.LOAD, lambda key=(caller, number): ran.append(key) or 0) for number in range(200)]
        events[-1].synchronize()

    callers = [threading.Thread(target=call, args=[caller]) for caller in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert sorted(ran) == [(caller, number) for caller in range(4) for number in range(200)]
    for caller in range(4):
        assert [number for c, number in ran if c == caller] == list(range(200))


def test_the_interpreter_ends_without_a_close():
    """Jobs that were handed over end first. No thread keeps the process alive, and none is killed at its work."""
    script = """
        import time, torch
        from tiered.offload.thread_transport import ThreadTransport
        from tiered.offload.transport import Lane
        transport = ThreadTransport()
        first = transport.run(Lane.LOAD, lambda: time.sleep(0.3) or 0)
        transport.run(Lane.SAVE, lambda: print("finished", flush=True) or 0, after=[first])
        transport.wait().synchronize()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "finished\n", "")


def test_a_lane_may_be_stopped_by_a_thread_that_holds_its_lock():
    """As by the finalizer of a transport that the garbage collector finds there."""
    lane = LaneThread("a lane")

    def stop() -> None:
        with lane._changed:
            lane.stop()

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    stopping.join(10)
    assert not stopping.is_alive()
