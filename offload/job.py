"""Work with what it waits for and the event that it ends with."""

from collections.abc import Callable
from dataclasses import dataclass

from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.transport import Settled


def whole(event: Event) -> Event:
    """All of `event`."""
    return event


@dataclass(frozen=True, slots=True)
class Job:
    """Work that begins when all of `after` has ended.

    However it fails, its event ends no earlier than everything in `after`: a fence that holds this event alone relies
    on that.

    Attributes:
        event: ends with the job.
        work: returns the bytes that it moved.
        after: what has to end first.
        before_wait: called before each wait for one of `after`.
        host_part: what of an event the host waits for before the work; the work itself sees to the rest.
    """

    event: HostEvent
    work: Callable[[], int]
    after: tuple[Event, ...]
    before_wait: Callable[[], None]
    host_part: Callable[[Event], Event] = whole

    def ready(self) -> bool:
        """Whether the host has nothing left to wait for."""
        return all(self.host_part(event).done() for event in self.after)

    def run(self) -> None:
        """Wait, work, and end the event. An `Exception` is the event's failure; anything worse is raised as well."""
        state = "not started, for what it waits for failed"
        try:
            for event in self.after:
                self.before_wait()
                self.host_part(event).synchronize()
            state = "failed"
            self.event.start()
            nbytes = self.work()
        except BaseException as error:
            cause = _first_cause(error)
            self.fail(f"{state}: {cause!r}", cause)
            if not isinstance(error, Exception):
                raise
        else:
            self.event.end(nbytes)

    def fail(self, message: str, cause: BaseException) -> None:
        """Fail, once everything in `after` is over."""
        try:
            for event in self.after:
                Settled(event).synchronize()
        finally:
            self.event.fail(message, cause)


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, TransferError) and error.__cause__ is not None:
        error = error.__cause__
    return error
