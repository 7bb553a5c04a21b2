"""A thread that runs jobs one after another and ends each of them."""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.transport import Settled

# Interval at which an idle thread checks whether the interpreter is ending. `atexit` is too late, because the
# interpreter joins all threads before it calls the functions registered there.
POLL_SECONDS = 0.25


def whole(event: Event) -> Event:
    return event


@dataclass(frozen=True, slots=True)
class Job:
    """Work that begins when all of `after` has ended.

    However the work fails, its event ends no earlier than everything in `after`, because a fence may hold only this
    event.

    Attributes:
        event: ends with the job.
        work: returns the bytes that it moved.
        after: events that must end first.
        host_part: the part of an event that the host waits for before the work; the work itself waits for the rest.
    """

    event: HostEvent
    work: Callable[[], int]
    after: tuple[Event, ...]
    host_part: Callable[[Event], Event] = whole

    def ready(self) -> bool:
        """True if the host need not wait for anything."""
        return all(self.host_part(event).done() for event in self.after)

    def run(self) -> None:
        """Wait, work, and end the event. An `Exception` fails the event; any other exception is also raised."""
        state = "not started, for what it waits for failed"
        try:
            for event in self.after:
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
        """Fail after everything in `after` has ended."""
        try:
            for event in self.after:
                Settled(event).synchronize()
        finally:
            self.event.fail(message, cause)


class LaneThread:
    """Runs jobs in the order of their submission on one thread, which starts with the first of them.

    If an exception other than an `Exception` ends the thread, the lane is dead. It then fails every job, each after all
    events that the job waits for have ended.
    """

    def __init__(self, name: str, begin: Callable[[], object] = lambda: None) -> None:
        """`begin`: the first work of the thread. If it fails, the lane is dead."""
        self._name, self._begin = name, begin
        self._pid = os.getpid()
        self._jobs: deque[Job] = deque()  # the first one is running
        self._changed = threading.Condition()  # may be entered again: `stop` is a finalizer, which runs anywhere
        self._thread: threading.Thread | None = None
        self._closed = False
        self._death: BaseException | None = None

    def check_open(self) -> None:
        """Raise `TransferError` if the lane is closed, or belongs to the parent of a forked process."""
        if os.getpid() != self._pid:
            raise TransferError(f"{self._name}: threads do not survive a fork; make a new transport in this process")
        if self._closed:
            raise TransferError(f"{self._name}: closed; make a new transport")

    def submit(self, job: Job, *, here_if_ready: bool = False) -> None:
        """Append `job`, or run it in this thread if `here_if_ready` is set and no wait is needed. Raises
        `TransferError` if the lane is closed, in a forked child, or if the system starts no more threads."""
        self.check_open()
        with self._changed:
            self.check_open()
            if here_if_ready and not self._jobs and self._death is None and job.ready():
                job.run()
                return
            self._start()
            self._jobs.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Accept no more jobs; the thread ends after those that it has."""
        if os.getpid() == self._pid:  # in a child, a thread that does not exist there may hold the lock
            with self._changed:
                self._closed = True
                self._changed.notify()

    def join(self) -> None:
        """Wait for the thread's end; call `stop` first."""
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, name=self._name)
        try:
            thread.start()
        except RuntimeError as error:
            raise TransferError(f"{self._name}: the system starts no more threads ({error})") from error
        self._thread = thread

    def _work(self) -> None:
        try:
            self._begin()
        except BaseException as error:
            self._death = error
        while True:
            try:
                if not self._run_first():
                    return
            except BaseException as error:
                self._death = self._death or error

    def _run_first(self) -> bool:
        """Run the first job; False if no job will come. Its references end with this call, not with the next."""
        with self._changed:
            while not self._jobs:
                self._closed = self._closed or not threading.main_thread().is_alive()
                if self._closed:
                    return False
                self._changed.wait(POLL_SECONDS)
            job = self._jobs[0]
        try:
            if self._death is None:
                job.run()
            else:
                job.fail(f"the thread of {self._name} died: {self._death!r}; make a new transport", self._death)
        finally:
            with self._changed:
                self._jobs.popleft()
        return True


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, TransferError) and error.__cause__ is not None:
        error = error.__cause__
    return error
