"""Transports with the speed of another machine's links, or with delays and faults at every point of a job.

They carry the same bytes as those of `tiered.offload`. Studies measure over slow links; the fuzz and tests make every
order of events happen.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tiered.offload.cuda_transport import CudaTransport
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.lane_thread import Job
from tiered.offload.thread_transport import LaneTransport, ThreadTransport, moves_nothing
from tiered.offload.transport import Copy, Lane, TransferEvent, Transport


class Point(StrEnum):
    """A moment before which a job may be held up."""

    SUBMIT = "submit"  # the job is handed over, in the caller's thread
    WAIT = "wait"  # the job waits for one event of its `after`
    COPY = "copy"  # one piece is copied, or the host's work runs


# Seconds to sleep, given the point and the lane (None for compute). An error that it raises is raised at that point.
Delay = Callable[[Point, Lane | None], float]


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of one direction of a link.

    Attributes:
        bandwidth: bytes a second.
        latency: seconds of each piece, beside its bytes.

    Raises:
        ValueError: a bandwidth that is not positive, a latency that is negative or not finite.
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and 0 <= self.latency < math.inf):
            raise ValueError(
                f"bandwidth = {self.bandwidth} must be positive, latency = {self.latency} 0 or more and finite"
            )

    def seconds(self, nbytes: int, pieces: int = 1) -> float:
        """The least time of `nbytes` in `pieces` pieces; the copy itself may take longer."""
        return nbytes / self.bandwidth + pieces * self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The speed of every lane of one transport. Lanes do not share it."""

    fetch: LinkSpeed = LinkSpeed()
    store: LinkSpeed = LinkSpeed()
    load: LinkSpeed = LinkSpeed()
    save: LinkSpeed = LinkSpeed()

    def least_end(self, lane: Lane, began: float, nbytes: int, pieces: int = 1) -> float:
        """The earliest end of a job that began at `began`, by `time.monotonic`."""
        return began + getattr(self, lane.value).seconds(nbytes, pieces)

    def carrying(self, lane: Lane, nbytes: int) -> AbstractContextManager[None]:
        """A context around the copy of a piece. It does nothing here: a job takes its time at its end."""
        return nullcontext()


class _Engine:
    """Carries one piece at a time, in the order in which they came."""

    def __init__(self) -> None:
        self.queue = deque[object]()  # the first one is carried
        self._changed = threading.Condition()

    @contextmanager
    def turn(self) -> Iterator[None]:
        own = object()
        with self._changed:
            self.queue.append(own)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self.queue[0] is own)
            yield
        finally:
            with self._changed:
                self.queue.remove(own)
                self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink(Link):
    """A link of several transports, like that of one device: pieces of a lane take turns, whichever transport copies
    them. Work of the host on files takes no turn."""

    engines: Mapping[Lane, _Engine] = field(
        default_factory=lambda: {lane: _Engine() for lane in Lane}, init=False, repr=False, compare=False
    )

    @contextmanager
    def carrying(self, lane: Lane, nbytes: int) -> Iterator[None]:
        """A context around the copy of a piece: the piece's turn, which lasts as long as the link takes."""
        with self.engines[lane].turn():
            began = time.monotonic()
            yield
            _sleep_until(self.least_end(lane, began, nbytes))


class _Simulated(LaneTransport):
    """A mixin that comes before a transport among the base classes."""

    def __init__(self, *given: Any, link: Link | None = None, delay: Delay | None = None, **more: Any) -> None:
        super().__init__(*given, **more)
        self._link, self._delay = link or Link(), delay

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        self.hold_up(Point.SUBMIT, lane)
        return super().copy(lane, copies, after)

    def run(self, lane: Lane, work: Callable[[], int], after: Iterable[Event] = ()) -> TransferEvent:
        def slowed() -> int:
            self.hold_up(Point.COPY, lane)
            began = time.monotonic()
            nbytes = work()
            _sleep_until(self._link.least_end(lane, began, nbytes))
            return nbytes

        self.hold_up(Point.SUBMIT, lane)
        return super().run(lane, slowed, after)

    def hold_up(self, point: Point, lane: Lane | None) -> None:
        """Sleep as the delay says."""
        if self._delay is not None and (seconds := self._delay(point, lane)) > 0:
            time.sleep(seconds)

    def _job(self, *given: Any, **more: Any) -> Job:
        job = super()._job(*given, **more)
        return replace(job, host_part=lambda each: _Held(job.host_part(each), self, job.event.lane))

    def _move(self, lane: Lane, copies: Sequence[Copy]) -> int:
        began = time.monotonic()
        nbytes = super()._move(lane, copies)
        pieces = sum(1 for copy in copies for _ in copy.pieces(self.piece_bytes))
        _sleep_until(self._link.least_end(lane, began, nbytes, pieces))
        return nbytes

    def _copy_piece(self, lane: Lane, piece: Copy) -> None:
        self.hold_up(Point.COPY, lane)
        with self._link.carrying(lane, piece.source.numel()):
            super()._copy_piece(lane, piece)


class SimulatedThreads(_Simulated, ThreadTransport):
    """A `ThreadTransport` over `link`, held up by `delay`. `compute_thread`: compute is a lane with a thread too, like
    a CUDA stream, so the caller goes on at once."""

    def __init__(self, *, compute_thread: bool = False, **more: Any) -> None:
        super().__init__(**more)
        self.compute_thread = compute_thread

    def wait(self, after: Iterable[Event] = ()) -> TransferEvent:
        if self.compute_thread:
            return self.compute(moves_nothing, after)
        self.hold_up(Point.SUBMIT, None)
        return super().wait(after)

    def compute(self, work: Callable[[], object], after: Iterable[Event]) -> TransferEvent:
        """Do `work` on the thread of compute, once `after` has ended."""
        self.hold_up(Point.SUBMIT, None)
        return self._submit(HostEvent(None), lambda: (work(), 0)[1], after)


class SimulatedCuda(_Simulated, CudaTransport):
    """A `CudaTransport` over `link`. `delay` holds up the host's part of its work."""

    def wait(self, after: Iterable[Event] = ()) -> TransferEvent:
        self.hold_up(Point.SUBMIT, None)
        return super().wait(after)


def compute(transport: Transport, work: Callable[[], object], after: Iterable[Event] = ()) -> TransferEvent:
    """Let compute do `work` once `after` has ended. The event ends with the work."""
    if isinstance(transport, SimulatedThreads) and transport.compute_thread:
        return transport.compute(work, after)
    waited = transport.wait(after)
    if waited.failed:
        return waited
    work()
    return transport.wait()


class _Held:
    """`event`; the transport holds up each wait for it."""

    def __init__(self, event: Event, transport: _Simulated, lane: Lane | None) -> None:
        self._event, self._transport, self._lane = event, transport, lane

    def done(self) -> bool:
        return self._event.done()

    def synchronize(self) -> None:
        self._transport.hold_up(Point.WAIT, self._lane)
        self._event.synchronize()


def _sleep_until(deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left)
