"""Events of the choices of one HTTP request, from the scheduler's thread to a server's event loop."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from tiered.serving.request import Request


@dataclass(frozen=True, slots=True)
class Final:
    """The next tokens of choice `index` are final."""

    index: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Draft:
    """A block of choice `index` after a forward.

    Attributes:
        first: its first column behind the prompt.
        before: the token in front of it; None for the prompt's last one.
        ids: its tokens; proposals for the open ones.
        open: whether each token is open.
    """

    index: int
    first: int
    before: int | None
    ids: list[int]
    open: list[bool]


@dataclass(frozen=True, slots=True)
class Finished:
    """The request of choice `index` has ended."""

    index: int
    request: Request


@dataclass(frozen=True, slots=True)
class Failed:
    """No choice is answered any further."""

    error: Exception


OfChoice = Final | Draft | Finished
ChoiceEvent = OfChoice | Failed


class Feed:
    """A queue from other threads. Events behind the end of the loop are dropped."""

    def __init__(self) -> None:
        """Made in the event loop that reads it."""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[ChoiceEvent] = asyncio.Queue()

    def put(self, event: ChoiceEvent) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self) -> ChoiceEvent:
        return await self._events.get()


class ChoiceStreamer:
    """The streamer of one choice. It sends tokens once all tokens in front of them are final too."""

    def __init__(self, feed: Feed, index: int) -> None:
        self._feed, self.index = feed, index
        self._sent, self._blocks = 0, -1  # tokens sent; tokens of finished blocks, -1 before the prompt

    def put(self, value: Tensor) -> None:
        """The prompt, then every final block."""
        if self._blocks < 0:
            self._blocks = 0
            return
        self._send(value[0].tolist())
        self._blocks += value.shape[1]

    def put_open(self, value: Tensor, still: Tensor) -> None:
        whole = still[0].int().cumsum(dim=0) == 0
        self._send(value[0][whole].tolist())

    def end(self) -> None:
        """See `Streamer`; `Finished` says more."""

    def _send(self, block: list[int]) -> None:
        if new := block[self._sent - self._blocks :]:
            self._sent += len(new)
            self._feed.put(Final(self.index, new))


class DraftStreamer(ChoiceStreamer):
    """The same, with every draft."""

    _before: int | None = None

    def put(self, value: Tensor) -> None:
        """See `ChoiceStreamer`."""
        if self._blocks >= 0:
            self._before = value[0].tolist()[-1]
        super().put(value)

    def put_draft(self, value: Tensor) -> None:
        self._draft = value

    def put_open(self, value: Tensor, still: Tensor) -> None:
        self._feed.put(Draft(self.index, self._blocks, self._before, self._draft[0].tolist(), still[0].tolist()))
        super().put_open(value, still)
