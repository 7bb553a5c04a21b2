"""One call on its way through a scheduler: it waits, runs, and ends in an output or in an error."""

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from enum import StrEnum
from typing import Any

from torch import Tensor

from tiered.call import AskedCall
from tiered.core.features import Account
from tiered.decoding.observers import Streamer
from tiered.decoding.publishing import Denoised
from tiered.forward.ask import Ask, shared_bytes
from tiered.output import GenerationOutput
from tiered.runtime import Runtime
from tiered.tiers.manager import TierManager


class State(StrEnum):
    """Where a request stands. The last four are for good."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LATE = "late"


class CancelledRequest(RuntimeError):
    """The request was cancelled."""


class LateRequest(TimeoutError):
    """A request was not over in its time."""


class Request:
    """Made by `Scheduler.submit`. What is public here may be read in any thread; `cancel` may be called in any.

    Attributes:
        number: by arrival, from 0 on.
        asked: the call.
        state: where it stands.
        output: of one that is done.
        error: of one that ended otherwise.
        arrived, began, ended: of `time.monotonic`; None before.
        ask: what it wants of the model next.
        turn: the round in which it was last served.
    """

    def __init__(
        self,
        number: int,
        asked: AskedCall,
        *,
        streamer: Streamer | None = None,
        on_end: Callable[["Request"], object] | None = None,
        seconds: float | None = None,
    ) -> None:
        """`on_end` is called once, in the scheduler's thread. `seconds`: it may take, waiting included."""
        self.number, self.asked, self.state = number, asked, State.WAITING
        self.output: GenerationOutput | None = None
        self.error: Exception | None = None
        self.arrived = time.monotonic()
        self.began: float | None = None
        self.ended: float | None = None
        self.ask: Ask | None = None
        self.turn = -1
        self._streamer, self._on_end, self._seconds = streamer, on_end, seconds
        self._cancelled = False
        self._held = ExitStack()
        self._steps: Generator[Ask, Tensor, Denoised] | None = None
        self._tiers: TierManager | None = None

    def __repr__(self) -> str:
        return f"<Request {self.number}: {self.state}>"

    @property
    def over(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.state not in (State.WAITING, State.RUNNING)

    def cancel(self) -> None:
        """End it, and free what it holds before the next step. A request that is over does not change."""
        self._cancelled = True

    def why_leave(self) -> CancelledRequest | LateRequest | None:
        """Why it is not to go on; None: it is."""
        if self._cancelled:
            return CancelledRequest("the request was cancelled")
        if self._seconds is not None and time.monotonic() - self.arrived > self._seconds:
            return LateRequest(f"the request was not over in {self._seconds:g} s")
        return None

    def begin(self, runtime: Runtime) -> None:
        """Book what the call takes, and let it ask for its first forward.

        Raises:
            TierCapacityError: there is no room now.
        """
        shared = {Account.ACTIVATIONS: shared_bytes(self.asked.sizes)}
        with ExitStack() as held:
            held.enter_context(runtime.ledger.holding(shared, hint="raise `memory`"))
            denoiser, self._tiers = held.enter_context(runtime.begin(self.asked, streamer=self._streamer))
            self._steps = denoiser.steps()
            self.ask = next(self._steps)
            self._held = held.pop_all()
        self.state, self.began = State.RUNNING, time.monotonic()

    def advance(self, runtime: Runtime, answer: Tensor | ValueError) -> None:
        """Commit what the logits say, or hear the error in place of them; it asks for the next forward, or is done."""
        assert self._steps is not None, "it has begun"
        try:
            send: Any = self._steps.throw if isinstance(answer, ValueError) else self._steps.send
            self.ask = send(answer)
        except StopIteration as done:
            moved = None if self._tiers is None else self._tiers.ended()
            self._free()
            self.output = runtime.output(self.asked, done.value, moved)
            self._end(State.DONE)

    def leave(self, error: Exception) -> None:
        """End in an error, and give back what it holds."""
        states = {CancelledRequest: State.CANCELLED, LateRequest: State.LATE}
        self.error = error
        try:
            self._free()
        finally:
            self._end(states.get(type(error), State.FAILED))

    def _free(self) -> None:
        self.ask = None
        if self._steps is not None:
            self._steps.close()
        self._steps = self._tiers = None
        self._held.close()

    def _end(self, state: State) -> None:
        self.state, self.ended = state, time.monotonic()
        if self._streamer is not None:
            self._streamer.end()
        if self._on_end is not None:
            self._on_end(self)
