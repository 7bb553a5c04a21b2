"""A request of a scheduler, which waits in a queue, runs, and ends with an output or an error."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from itertools import count
from typing import Any

from torch import Tensor

from tiered.core.features import Account
from tiered.decoding.asking import Answer, Asking, go_on
from tiered.decoding.observers import Streamer
from tiered.decoding.output_writer import GenerationState
from tiered.forward.forward import AskedPass
from tiered.forward.together import shared_bytes
from tiered.output import GenerationOutput
from tiered.prepare import PreparedCall
from tiered.runtime import Runtime
from tiered.tiers.tiers import Tiers


class RequestState(StrEnum):
    """State of a request. The last four are final."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LATE = "late"


class BusyError(RuntimeError):
    """The queue is full."""


class ClosedError(RuntimeError):
    """The scheduler accepts no more requests."""


class CancelledRequest(RuntimeError):
    """The request was cancelled."""


class RequestTimeout(TimeoutError):
    """The request took longer than its limit."""


class Request:
    """A request, made by `Scheduler.submit`. Any thread may read attributes and call `cancel`.

    Attributes:
        number: number by arrival, from 0.
        call: the prepared call.
        state: state of the request.
        output: output of the call; None unless the call ran to its end.
        enough: tokens of an answer that was complete before the call's end; None if none was.
        error: error of the request; None unless it ended with one.
        arrived, ended: seconds of `time.monotonic`; `ended` is None before the end.
        asked: the next pass, and the layers that it goes through, or a tensor to read before it; None if there is
            neither.
        turn: number of the round that served the request last.
    """

    def __init__(
        self,
        number: int,
        call: PreparedCall,
        *,
        streamer: Streamer | None = None,
        on_end: Callable[["Request"], object] | None = None,
        seconds: float | None = None,
    ) -> None:
        """`on_end` is called once, in the scheduler's thread. `seconds`: most seconds, queue included; None for no
        limit."""
        self.number, self.call, self.state = number, call, RequestState.WAITING
        self.output: GenerationOutput | None = None
        self.error: Exception | None = None
        self.arrived = time.monotonic()
        self.ended: float | None = None
        self.asked: AskedPass | Tensor | None = None
        self.turn = -1
        self._streamer, self._on_end, self._seconds = streamer, on_end, seconds
        self.enough: int | None = None
        self._cancelled = False
        self._held = ExitStack()
        self._steps: Asking[GenerationState] | None = None
        self._tiers: Tiers | None = None

    def __repr__(self) -> str:
        return f"<Request {self.number}: {self.state}>"

    @property
    def over(self) -> bool:
        return self.state not in (RequestState.WAITING, RequestState.RUNNING)

    def cancel(self, *, enough: int | None = None) -> None:
        """End the request and free its memory before its next step. A finished request does not change.

        `enough`: number of tokens that are the answer. The request is then done, not cancelled.
        """
        self.enough = self.enough if enough is None else enough
        self._cancelled = True

    def why_leave(self) -> CancelledRequest | RequestTimeout | None:
        """The error that must end the request before its next step; None if it goes on."""
        if self._cancelled:
            return CancelledRequest("the request was cancelled")
        if self._seconds is not None and time.monotonic() - self.arrived > self._seconds:
            return RequestTimeout(f"the request was not done within {self._seconds:g} s")
        return None

    def begin(self, runtime: Runtime, beside: Sequence[PreparedCall] = ()) -> None:
        """Book the call's bytes and run its loop up to the first forward. `beside`: as of `Runtime.begin`. Raises
        `TierCapacityError` if the budget has no room now."""
        shared = {Account.ACTIVATIONS: shared_bytes(self.call.sizes)}
        with ExitStack() as held:
            held.enter_context(runtime.ledger.holding(shared, hint="raise `memory`"))
            denoiser, self._tiers = held.enter_context(runtime.begin(self.call, streamer=self._streamer, beside=beside))
            self._steps = denoiser.steps()
            self.asked = go_on(self._steps)
            self._held = held.pop_all()
        self.state = RequestState.RUNNING

    def advance(self, runtime: Runtime, answer: Answer | ValueError) -> None:
        """Pass the logits, an error in their place, or the tensor on the host to the loop, which runs to its next
        forward or read, or its end."""
        assert self._steps is not None, "it has begun"
        try:
            self.asked = go_on(self._steps, answer)
        except StopIteration as done:
            moved = None if self._tiers is None else self._tiers.ended()
            self._free()
            self.output = runtime.output(self.call, done.value, moved)
            self._end(RequestState.DONE)

    def leave(self, error: Exception) -> None:
        """End the request with an error, or without one if it was cancelled with `enough`, and free its memory."""
        states = {CancelledRequest: RequestState.CANCELLED, RequestTimeout: RequestState.LATE}
        state = states.get(type(error), RequestState.FAILED)
        if state is RequestState.CANCELLED and self.enough is not None:
            state = RequestState.DONE
        else:
            self.error = error
        try:
            self._free()
        finally:
            self._end(state)

    def _free(self) -> None:
        self.asked = None
        if self._steps is not None:
            self._steps.close()
        self._steps = self._tiers = None
        self._held.close()

    def _end(self, state: RequestState) -> None:
        self.state, self.ended = state, time.monotonic()
        if self._streamer is not None:
            self._streamer.end()
        if self._on_end is not None:
            self._on_end(self)


class RequestQueue:
    """Waiting requests, by arrival. Any thread may call methods.

    Attributes:
        changed: condition that guards the queue; notified when a request arrives and when the queue closes.
        closed: reason for accepting no more requests; None while the queue accepts them.
    """

    def __init__(self, most: int) -> None:
        """`most`: most waiting requests."""
        self._most, self._numbers = most, count()
        self._waiting: deque[Request] = deque()
        self.changed = threading.Condition()
        self.closed: str | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def require_open(self) -> None:
        if self.closed is not None:
            raise ClosedError(self.closed)

    def add(self, call: PreparedCall, **options: Any) -> Request:
        """A new request for `call`; `options`: arguments of `Request`. Raises `BusyError` if the queue is full,
        `ClosedError` if it is closed."""
        with self.changed:
            self.require_open()
            if len(self._waiting) >= self._most:
                raise BusyError(f"{len(self._waiting)} requests wait, the most allowed; try again later")
            self._waiting.append(request := Request(next(self._numbers), call, **options))
            self.changed.notify_all()
        return request

    def requests(self) -> list[Request]:
        with self.changed:
            return [*self._waiting]

    def take(self) -> Request | None:
        """Remove and return the first request; None if the queue is empty."""
        with self.changed:
            return self._waiting.popleft() if self._waiting else None

    def put_back(self, request: Request) -> bool:
        """Put `request` in front of the others. Returns False, without doing so, if the queue is closed."""
        with self.changed:
            if self.closed is None:
                self._waiting.appendleft(request)
            return self.closed is None

    def discard(self, request: Request) -> None:
        """Remove `request` if it is in the queue."""
        with self.changed:
            if request in self._waiting:
                self._waiting.remove(request)

    def close(self, why: str) -> list[Request]:
        """Accept no more requests. Removes and returns the waiting ones; a reason given before stays."""
        with self.changed:
            self.closed = self.closed or why
            refused = [*self._waiting]
            self._waiting.clear()
            self.changed.notify_all()
        return refused
