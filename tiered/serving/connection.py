"""Connections of the server: a request has to come in time, and connections without one leave before there are too
many."""

import json
import sys
import time
from asyncio import TimerHandle, Transport
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tiered.serving.replies import error_body

BACKLOG = 64  # connections that wait to be accepted; asyncio may accept as many before one of them can be closed
_FILES = 128  # descriptors beside those of connections
_MOST = 4096


def most_connections() -> int:
    """Connections that the process's limit of open files leaves room for, at most 4096."""
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return _MOST
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(16, min(_MOST, files - BACKLOG - _FILES))


class Connection(H11Protocol):
    """uvicorn's protocol, with a limit of time for a request's headers and a limit of connections.

    The body has a limit of its own. While a request is answered the connection has none.
    """

    def __init__(self, *args: Any, header_seconds: float, most: int, **more: Any) -> None:
        """
        Args:
            header_seconds: from the first moment of the connection, or the end of the answer before, to the last
                header.
            most: connections. One more closes that which has been without a whole request for the longest time.
        """
        super().__init__(*args, **more)
        self._header_seconds, self._most = header_seconds, most
        self._late: TimerHandle | None = None
        self._since = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether no whole request has come that is still to be answered."""
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
        self._refuse(getattr(sys.exception(), "error_status_hint", 400), msg)

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
            self._refuse(408, f"the headers did not come in {self._header_seconds:g} s")
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
