"""The end of a job on a CUDA stream."""

import time

import torch

from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.transport import Lane, Settled, Times


class CudaClock:
    """Places CUDA events on the host's clock. An hour after the first mark, the distance to it is exact to 0.25 ms. The
    distance between two events of one job is exact to a microsecond, so it is measured directly."""

    def __init__(self, idle: torch.cuda.Stream) -> None:
        """`idle`: a stream without work, because the host waits for its end."""
        self._mark = mark(idle)
        self._mark.synchronize()
        self._marked_at = time.monotonic_ns()

    def ns(self, event: torch.cuda.Event) -> int:
        """End of the completed `event` in ns of the host's clock."""
        return self._marked_at + ns_between(self._mark, event)


class CudaEvent:
    """Ends when the device has completed the job. `issued` is the host's part. It ends once the job is on its stream,
    or has failed before."""

    __slots__ = ("_broken", "_clock", "arrival", "end", "issued", "start")

    def __init__(self, issued: HostEvent, clock: CudaClock | None = None) -> None:
        """`clock`: the clock of `times`; None if no caller reads them."""
        self.issued = issued
        self.arrival: torch.cuda.Event | None = None  # of `wait`: when its stream reached it
        self.start: torch.cuda.Event | None = None
        self.end: torch.cuda.Event | None = None
        self._clock = clock
        self._broken: RuntimeError | None = None

    @property
    def lane(self) -> Lane | None:
        return self.issued.lane

    @property
    def nbytes(self) -> int:
        return self.issued.nbytes

    @property
    def failed(self) -> bool:
        return self.done() and (self.issued.failed or self._broken is not None)

    @property
    def times(self) -> Times:
        submitted = self.issued.times.submitted
        if not self.done() or self.failed:
            return Times(submitted, None, self.issued.times.ended if self.issued.failed else None)
        assert self.start is not None and self.end is not None, "a job on a stream has marks"
        assert self._clock is not None, "an event with times has a clock"
        if self.arrival is None:
            started = self._clock.ns(self.start)
        else:
            submitted = self._clock.ns(self.arrival)
            started = submitted + ns_between(self.arrival, self.start)
        return Times(submitted, started, started + ns_between(self.start, self.end))

    def done(self) -> bool:
        if not self.issued.done():
            return False
        if self.issued.failed:
            return True
        assert self.end is not None, "a job on a stream has marks"
        try:
            return self.end.query()
        except RuntimeError as error:  # the device is lost, and its work has stopped
            self._broken = error
            return True

    def synchronize(self) -> None:
        self.issued.synchronize()
        assert self.end is not None, "a job on a stream has marks"
        try:
            self.end.synchronize()
        except RuntimeError as error:
            self._broken = error
            raise TransferError(f"{self.issued}: the device failed: {error}") from error


def end_of_stream(device: torch.device) -> CudaEvent:
    """An event that ends with the present work of the current stream of `device`."""
    event = CudaEvent(HostEvent(None))
    event.issued.end(0)
    event.end = mark(torch.cuda.current_stream(device))
    return event


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event at the present end of `stream`."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def ns_between(first: torch.cuda.Event, second: torch.cuda.Event) -> int:
    """Time between two completed events."""
    return round(first.elapsed_time(second) * 1e6)


def host_part(event: Event) -> Event:
    """The part of `event` that the host waits for before a stream can wait for the rest; all of a host's event."""
    if isinstance(event, Settled):
        return Settled(host_part(event.event))
    return event.issued if isinstance(event, CudaEvent) else event


def stream_part(event: Event) -> torch.cuda.Event | None:
    """The part of `event` that a stream waits for once `host_part(event)` has ended; None if there is none."""
    event = event.event if isinstance(event, Settled) else event
    return event.end if isinstance(event, CudaEvent) else None
