"""The process that serves an application until a signal.

Requests have a time limit for their headers. Connections without a request are closed if there are too many.
"""

import asyncio
import json
import logging
import math
import signal
import socket
import sys
import time
from asyncio import TimerHandle, Transport
from functools import partial
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tiered.serving.app import Service, make_app
from tiered.serving.replies import error_body
from tiered.serving.request import ClosedError
from tiered.serving.responder import Responder

_LOG = logging.getLogger(__name__)

_HEADER_SECONDS = 10.0
BACKLOG = 64  # connections waiting for accept; asyncio may accept as many before one of them can be closed
_FILES = 128  # file descriptors beside those of connections
_MOST = 4096


def most_connections() -> int:
    """Most connections under the process's limit of open files, up to 4096."""
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return _MOST
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(16, min(_MOST, files - BACKLOG - _FILES))


class Connection(H11Protocol):
    """uvicorn's protocol with a time limit for a request's headers and a limit of connections.

    The application limits the time of the body. A connection has no time limit while its request is answered.
    """

    def __init__(self, *args: Any, header_seconds: float, most: int, **more: Any) -> None:
        """
        Args:
            header_seconds: most seconds from the connection's start, or the end of the last answer, to the last header.
            most: most connections. One more closes the connection that has been without a whole request longest.
        """
        super().__init__(*args, **more)
        self._header_seconds, self._most = header_seconds, most
        self._late: TimerHandle | None = None
        self._since = time.monotonic()

    @property
    def idle(self) -> bool:
        """True if the connection has no whole request to answer."""
        return self._between or self.cycle.more_body

    @property
    def _between(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._restart_timer()
        if len(self.connections) > self._most:
            idle = [each for each in self.connections if isinstance(each, Connection) and each.idle]
            min(idle, key=lambda each: each._since).abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._restart_timer()

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        super().on_response_complete()
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def abort(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        status = getattr(sys.exception(), "error_status_hint", 400)
        self._refuse(status, "the headers are too large" if status == 431 else msg)

    def _restart_timer(self) -> None:
        if not self._between:
            self._stop_timer()
        elif self._late is None:
            self._late = self.loop.call_later(self._header_seconds, self._end_late)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end_late(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(408, f"the headers did not arrive within {self._header_seconds:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(error_body(message, "invalid_request_error")).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        answer = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # no answer has begun
            events = answer, h11.Data(data=body), h11.EndOfMessage()
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM, then rejects new and waiting requests and ends after the running ones.

    Meanwhile it goes on listening, to reject new requests. Requests that run past the grace period, or at the second
    signal, end with an error.
    """

    def __init__(
        self, service: Service, *, grace_seconds: float = 30.0, header_seconds: float = _HEADER_SECONDS
    ) -> None:
        """
        Args:
            grace_seconds: most seconds for running requests after a signal; the last second, or quarter, is for sending
                errors.
            header_seconds: most seconds of a connection for a request's headers.
        """
        self._scheduler, self._grace = service.scheduler, grace_seconds
        self._last = min(1.0, grace_seconds / 4)
        self._why, self._deadline, self._at_once = "the server ends", math.inf, False
        app = make_app(service)
        self._responders: set[Responder] = app.state.responders
        connection = partial(Connection, header_seconds=header_seconds, most=most_connections())
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", connection),
            ws="none",
            loop="asyncio",
            lifespan="off",
            backlog=BACKLOG,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        super().__init__(config)

    def serve_at(self, listening: socket.socket) -> None:
        """Start the scheduler and serve on a listening socket until a signal."""
        with self._scheduler:
            self.run(sockets=[listening])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn, but the signal is not raised again at the end."""
        self._why = f"the server ends ({signal.Signals(sig).name})"
        self._at_once, self.should_exit = self.should_exit, True

    async def on_tick(self, counter: int) -> bool:
        """As uvicorn, ten times a second: True to close the socket and end."""
        if not await super().on_tick(counter):
            return False
        now = asyncio.get_running_loop().time()
        if self._deadline == math.inf:
            self._scheduler.drain(self._why)
            self._deadline = now + self._grace - self._last
        return self._at_once or not self._responders or now >= self._deadline

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn, after ending unfinished answers with an error. Connections left after that are closed."""
        if self._responders:
            _LOG.warning("tiered: the server ends; unfinished answers end with an error: %d", len(self._responders))
        for responder in [*self._responders]:
            responder.fail(ClosedError(self._why))
        closing = asyncio.get_running_loop().call_later(max(0.2, self._last), self._abort)
        await super().shutdown(sockets)
        closing.cancel()

    def _abort(self) -> None:
        for connection in [*self.server_state.connections]:
            cast("Connection", connection).abort()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`; port 0 for a free one. Raises `OSError` if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
