"""The process that serves an application until a signal ends it."""

import asyncio
import logging
import math
import signal
import socket
from functools import partial
from types import FrameType
from typing import cast

import uvicorn

from tiered.serving.app import Service, make_app
from tiered.serving.connection import BACKLOG, Connection, most_connections
from tiered.serving.request import ClosedError
from tiered.serving.responder import Responder

_LOG = logging.getLogger(__name__)

_HEADER_SECONDS = 10.0


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM: then takes no more, refuses what waits, and ends once what runs is answered.

    Until then it goes on to listen, and refuses new requests. What runs past its time ends in an error, as all does at
    the second signal.
    """

    def __init__(
        self, service: Service, *, grace_seconds: float = 30.0, header_seconds: float = _HEADER_SECONDS
    ) -> None:
        """
        Args:
            grace_seconds: that running requests have once a signal has come, of which the last second, or quarter, is
                for their errors.
            header_seconds: that a connection has for the headers of a request.
        """
        self._scheduler, self._grace = service.scheduler, grace_seconds
        self._last = min(1.0, grace_seconds / 4)
        self._why, self._deadline, self._at_once = "the server ends", math.inf, False
        app = make_app(service)
        self._answering: set[Responder] = app.state.answering
        connection = partial(Connection, header_seconds=header_seconds, most=most_connections())
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", connection),
                ws="none",
                loop="asyncio",
                backlog=BACKLOG,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
            )
        )

    def serve_at(self, listening: socket.socket) -> None:
        """Start the scheduler and answer at a socket that listens; until a signal comes."""
        with self._scheduler:
            self.run(sockets=[listening])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn; a signal that is heard is not raised again at the end."""
        self._why = f"the server ends ({signal.Signals(sig).name})"
        self._at_once, self.should_exit = self.should_exit, True

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn: ten times a second, whether to close the socket and end."""
        if not await super().on_tick(counter):
            return False
        now = asyncio.get_running_loop().time()
        if self._deadline == math.inf:
            self._scheduler.drain(self._why)
            self._deadline = now + self._grace - self._last
        return self._at_once or not self._answering or now >= self._deadline

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. Answers that are under way end in an error; connections that are left after that are closed."""
        if self._answering:
            _LOG.warning("tiered: the server ends; answers under way that end in an error: %d", len(self._answering))
        for answering in [*self._answering]:
            answering.fail(ClosedError(self._why))
        closing = asyncio.get_running_loop().call_later(max(0.2, self._last), self._abort)
        await super().shutdown(sockets)
        closing.cancel()

    def _abort(self) -> None:
        for connection in [*self.server_state.connections]:
            cast("Connection", connection).abort()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`; port 0: at a free one. Raises `OSError` where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
