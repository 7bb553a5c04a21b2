"""Continuous batching: requests share the forwards of one runtime.

On the CPU each answer is the same as alone, bit for bit; `tiered.forward.together` explains why, and why not on CUDA.

Every request has its own canvas, store, rule, seed and clock, and yields one forward at a time. A round runs one
forward of each request. Compatible forwards go through the layers together, the others alone. Then the host reads once
how far all requests are. It reads once more for blocks that end and are streamed, and for answers that end. A round
runs only one long forward, such as the first pass over a long prompt. It pauses after every `max_prefill_rows` rows
times layers for a round of the other requests.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from tiered.core.checks import check_integer, check_number
from tiered.core.errors import TierCapacityError
from tiered.core.modes import call_modes
from tiered.decoding.asking import Answer, read_together
from tiered.decoding.observers import Streamer, check_streamer
from tiered.forward.forward import AskedPass
from tiered.forward.together import groups_of, logits_together, shareable
from tiered.offload.device import computing_on
from tiered.prepare import PreparedCall
from tiered.runtime import Runtime
from tiered.serving.counts import Counts, Work
from tiered.serving.request import ClosedError, Request, RequestQueue, RequestState

_LOG = logging.getLogger(__name__)


class Scheduler:
    """Answers requests of one runtime under its policy and codes.

    Any thread may call `submit` and `Request.cancel`. Rounds run in one thread: the caller's (`step`), or the
    scheduler's own (`start`). As a context manager it starts and closes itself.

    Attributes:
        counts: requests, tokens, forwards and times so far.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        max_running: int = 16,
        max_waiting: int = 256,
        max_prefill_rows: int = 512,
        seconds: float | None = None,
    ) -> None:
        """
        Args:
            max_running: most requests denoised at a time; the budget may allow fewer.
            max_waiting: most requests in the queue.
            max_prefill_rows: rows of a long forward, through all layers, between two steps of the other requests.
            seconds: most seconds of a request, queue included; None for no limit.

        Raises:
            TypeError, ValueError: a number of the wrong type, or out of range.
        """
        check_integer("max_running", max_running, least=1)
        check_integer("max_waiting", max_waiting, least=1)
        check_integer("max_prefill_rows", max_prefill_rows, least=1)
        if seconds is not None:
            check_number("seconds", seconds, least=0.0)
        self.runtime, self.counts = runtime, Counts()
        self.max_running, self.max_waiting, self.max_prefill_rows = max_running, max_waiting, max_prefill_rows
        self._seconds, self._round = seconds, 0
        self._queue = RequestQueue(max_waiting)
        self._running: list[Request] = []
        self._thread: threading.Thread | None = None
        self._cancelling = False
        self._full = False  # the next request had no room, and no request has ended since
        self._long: Request | None = None  # the request whose long forward is under way

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def closed(self) -> bool:
        return self._queue.closed is not None

    def submit(
        self, call: PreparedCall, *, streamer: Streamer | None = None, on_end: Callable[[Request], object] | None = None
    ) -> Request:
        """Put a call of one prompt (`Runtime.prepare`) into the queue.

        Args:
            streamer: as for `Runtime.generate`; called in the scheduler's thread.
            on_end: called once at the request's end, in the scheduler's thread or in `drain`.

        Raises:
            TierCapacityError: the budget has no room for the call, even alone.
            BusyError: the queue is full.
            ClosedError: the scheduler is closed.
            ValueError: several prompts.
        """
        if len(call.prompts.ids) != 1:
            raise ValueError(f"the call has {len(call.prompts.ids)} prompts; one is allowed: submit each by itself")
        check_streamer(streamer)
        self.runtime.check_alone(call)
        return self._queue.add(call, streamer=streamer, on_end=on_end, seconds=self._seconds)

    @call_modes
    def step(self) -> bool:
        """Run one round. Returns whether a request is left."""
        with computing_on(self.runtime.device):
            self._turn_over()
            if self._running:
                with self.counts.clock.of(Work.OWN):
                    self._serve()
        return bool(self._running or self._queue)

    def run(self) -> None:
        while self.step():
            pass

    # Its own thread.

    def start(self) -> None:
        """Run rounds in a thread while there are requests, until `close`. Raises `ClosedError` if the scheduler is
        closed."""
        with self._queue.changed:
            self._queue.require_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._rounds, name="tiered-scheduler", daemon=True)
                self._thread.start()

    def drain(self, why: str = "the scheduler is closed") -> None:
        """Stop accepting requests, reject waiting ones, finish running ones."""
        for request in self._queue.close(why):
            self._end(request, ClosedError(why))

    def close(self, *, cancel: bool = False) -> None:
        """`drain`, then wait for the running requests, or with `cancel` cancel them. A second call does nothing."""
        self.drain()
        if cancel:
            self._cancelling = True  # for a request that is just beginning: it joins those that run
            for request in [*self._running]:
                request.cancel()
        if self._thread is not None:
            self._thread.join()
        else:
            self.run()

    def __enter__(self) -> "Scheduler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close(cancel=True)

    def _rounds(self) -> None:
        while True:
            with self._queue.changed:
                self._queue.changed.wait_for(lambda: self._queue or self._running or self.closed)
                if self.closed and not self._running:
                    return
            try:
                self.step()
            except Exception as error:  # a defect: running requests cannot go on
                _LOG.exception("a round failed")
                for request in self._running:
                    self._end(request, error)
                self._running.clear()
                self._full = False

    # A round.

    def _turn_over(self) -> None:
        """End cancelled and late requests, and begin waiting ones in order, as far as the budget has room."""
        self._let_leave()
        while len(self._running) < self.max_running and not self._full:
            if (request := self._queue.take()) is None:
                return
            waiting = [] if self._running else [each.call for each in self._queue.requests()]
            try:
                with self.counts.clock.of(Work.MODEL):
                    request.begin(self.runtime, waiting[: self.max_running - 1])
                self._running.append(request)
                if self._cancelling:
                    request.cancel()
            except TierCapacityError as error:
                self._full = bool(self._running) and self._queue.put_back(request)
                if not self._full:
                    self._end(request, error)
            except Exception as error:
                self._end(request, error)

    def _let_leave(self) -> None:
        for request in [*self._running, *self._queue.requests()]:
            # A request whose long forward is under way ends inside that forward.
            if not request.over and request is not self._long and (why := request.why_leave()) is not None:
                self._end(request, why)
            if request.over:
                self._full = False
                self._queue.discard(request)
                if request in self._running:
                    self._running.remove(request)

    def _serve(self) -> None:
        self._round += 1
        running = [each for each in self._running if each is not self._long]
        asking = [(each, asked) for each in running if isinstance(asked := each.asked, tuple)]
        short = [(request, asked) for request, asked in asking if asked[1].count <= self.max_prefill_rows]
        shared = [(request, asked) for request, asked in short if shareable(*asked)]
        for numbers in groups_of([pass_ for _, (_, pass_) in shared]):
            self._forward([shared[number] for number in numbers])
        for request, asked in short:
            if not shareable(*asked):
                self._forward([(request, asked)])
        self._read()
        long = [(request, asked) for request, asked in asking if asked[1].count > self.max_prefill_rows]
        if long and self._long is None:
            self._forward_long(*min(long, key=lambda each: (each[0].turn, each[0].number)))
            self._read()
        self._let_leave()

    def _forward_long(self, request: Request, asked: AskedPass) -> None:
        """Run a long forward, with rounds of the other requests in between."""
        most, passed = self.runtime.model.shape.layers * self.max_prefill_rows, 0.0
        forward, _ = asked

        def between(rows: float) -> None:
            nonlocal passed
            passed += rows
            if passed < most:
                return
            passed = 0.0
            if (why := request.why_leave()) is not None:
                raise why
            with self.counts.clock.of(Work.OWN):
                self._turn_over()
                self._serve()

        self._long, forward.between = request, between
        try:
            self._forward([(request, asked)])
        finally:
            self._long, forward.between = None, None

    def _forward(self, group: Sequence[tuple[Request, AskedPass]]) -> None:
        with self.counts.clock.of(Work.MODEL):
            self.counts.forwards += 1
            self.counts.taken += len(group)
            try:
                answers: Sequence[Answer | Exception] = logits_together([asked for _, asked in group])
            except Exception as error:
                if len(group) > 1:  # alone, only the request that caused the error fails
                    _LOG.warning("a shared forward failed", exc_info=error)
                    for each in group:
                        self._forward([each])
                    return
                answers = [error]
            for (request, _), answer in zip(group, answers, strict=True):
                self._advance(request, answer)

    def _read(self) -> None:
        """Read what requests ask for, in one read for all of them, until each asks for a forward or is over."""
        with self.counts.clock.of(Work.MODEL):
            while asking := [(each, asked) for each in self._running if isinstance(asked := each.asked, Tensor)]:
                for (request, _), found in zip(asking, read_together([asked for _, asked in asking]), strict=True):
                    self._advance(request, found)

    def _advance(self, request: Request, answer: Answer | Exception) -> None:
        request.turn = self._round
        try:
            if isinstance(answer, Exception) and not isinstance(answer, ValueError):
                raise answer
            request.advance(self.runtime, answer)
        except Exception as error:
            self._end(request, error)
        else:
            if request.output is not None:
                self.counts.add(request.output)
                self.counts.ended[request.state] += 1

    def _end(self, request: Request, error: Exception) -> None:
        """End a request with an error, even if its callbacks raise."""
        if request.over:  # the request was done; a callback has raised
            _LOG.exception("a callback of %r failed", request)
            return
        try:
            request.leave(error)
        except Exception:
            _LOG.exception("a callback of %r failed", request)
        self.counts.ended[request.state] += 1
        if request.state is RequestState.DONE:
            self.counts.tokens += request.enough or 0
