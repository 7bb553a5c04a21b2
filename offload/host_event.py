"""The end of a job that the host runs or submits."""

import os
import threading
import time

from tiered.offload.errors import TransferError
from tiered.offload.transport import Lane, Times


class HostEvent:
    """Ends when the thread of the job calls `end` or `fail`. A forked child has no such thread, so there an unfinished
    event has failed."""

    __slots__ = ("_cause", "_ended", "_ended_at", "_failure", "_pid", "_started_at", "_submitted_at", "lane", "nbytes")

    def __init__(self, lane: Lane | None, nbytes: int = 0) -> None:
        self.lane = lane
        self.nbytes = nbytes
        self._failure: str | None = None
        self._cause: BaseException | None = None
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._submitted_at = time.monotonic_ns()
        self._started_at: int | None = None
        self._ended_at: int | None = None

    def __str__(self) -> str:
        return "compute" if self.lane is None else f"{self.lane} of {self.nbytes} bytes"

    @property
    def failed(self) -> bool:
        return self._left_behind() or (self._ended.is_set() and self._failure is not None)

    @property
    def times(self) -> Times:
        return Times(self._submitted_at, self._started_at, self._ended_at)

    def done(self) -> bool:
        return self._ended.is_set() or self._left_behind()

    def synchronize(self) -> None:
        if self._left_behind():
            raise TransferError(f"{self}: threads do not survive a fork; only the parent process sees its end")
        self._ended.wait()
        if self._failure is not None:
            # A new one each time, because raising one exception repeatedly lengthens its traceback.
            raise TransferError(self._failure) from self._cause

    def start(self) -> None:
        self._started_at = time.monotonic_ns()

    def end(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ended_at = time.monotonic_ns()
        self._ended.set()

    def fail(self, message: str, cause: BaseException | None) -> None:
        """End the event as failed; no effect if it has ended already."""
        if not self._ended.is_set():
            self._failure, self._cause = f"{self}: {message}", cause
            self._ended_at = time.monotonic_ns()
            self._ended.set()

    def _left_behind(self) -> bool:
        return not self._ended.is_set() and os.getpid() != self._pid
