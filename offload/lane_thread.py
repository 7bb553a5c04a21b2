"""A thread that runs jobs one after another, and never leaves one of them without an end."""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.transport import Settled

# How long an idle thread sleeps before it looks whether the interpreter is ending. `atexit` is too late: the
# interpreter joins all threads before it calls what is registered there.
POLL_SECONDS = 0.25


def whole(event: Event) -> Event:
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
        host_part: the part of an event that the host waits for before the work; the work itself waits for the rest.
    """

    event: HostEvent
    work: Callable[[], int]
    after: tuple[Event, ...]
    host_part: Callable[[Event], Event] = whole

    def ready(self) -> bool:
        """Whether the host has nothing left to wait for."""
        return all(self.host_part(event).done() for event in self.after)

    def run(self) -> None:
        """Wait, work, and end the event. An `Exception` is the event's failure; anything worse is raised as well."""
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
        """Fail, once everything in `after` is over."""
        try:
            for event in self.after:
                Settled(event).synchronize()
        finally:
            self.event.fail(message, cause)


class LaneThread:
    """Runs jobs in the order of their submission on one thread, which starts with the first of them.

    Where something worse than an `Exception` hits the thread, the lane is dead: it fails every job from then on, each
    once all that the job waits for is over.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._jobs: deque[Job] = deque()  # the first one is running
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._closed = False
        self._death: BaseException | None = None

    def check_open(self) -> None:
        """Raise TransferError where the lane is closed, or belongs to the parent of a forked process."""
        if os.getpid() != self._pid:
            raise TransferError(f"{self._name}: threads do not survive a fork; make a new transport in this process")
        if self._closed:
            raise TransferError(f"{self._name}: closed; make a new transport")

    def submit(self, job: Job, *, here_if_ready: bool = False) -> None:
        """Append `job`, or run it in this thread if `here_if_ready` allows it and nothing has to be waited for. Raises
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
        """Take no more jobs; the thread ends after those that it has."""
        if os.getpid() == self._pid:  # in a child, the lock may be held by a thread that is not there
            with self._changed:
                self._closed = True
                self._changed.notify()

    def join(self) -> None:
        """Wait for the thread's end; `stop` comes first."""
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
        while True:
            try:
                if not self._run_first():
                    return
            except BaseException as error:
                self._death = self._death or error

    def _run_first(self) -> bool:
        """Run the first job; False where there will be none. Its references end with this call, not with the next."""
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
