"""The HTTP server: OpenAI's endpoints, health, metrics and the page, over one scheduler."""

import asyncio
import hmac
import html
import logging
import math
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tiered.serving.answering import Answering, Gone, asked_calls, logged
from tiered.serving.connection import BACKLOG, Connection, most_connections
from tiered.serving.metrics import registry_of
from tiered.serving.openai_fields import Limits, RefusedBody, read_body, read_json
from tiered.serving.replies import Replies, error_body, told
from tiered.serving.scheduler import BusyError, ClosedError, Scheduler

_LOG = logging.getLogger(__name__)

LOCAL = ("127.0.0.1", "localhost", "::1")
_HEADER_SECONDS, _BODY_SECONDS = 10.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is served, and to whom.

    Attributes:
        scheduler: answers; it is started and closed by who serves.
        model: the name that it is served under.
        defaults: options of `generate` that a request may overrule.
        limits: of a request.
        key: API key that requests bear, printable ASCII without spaces; None for none.
        example: a prompt that the page offers.
        hosts: names that the Host header may have; None for any. Another site's page, in a browser on this machine,
            could call a local server by a name of its own.
    """

    scheduler: Scheduler
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    key: str | None = field(default=None, repr=False)
    example: str = "Why is the sky blue? Answer in two sentences."
    hosts: tuple[str, ...] | None = None


def check_api_key(name: str, key: str | None) -> None:
    """Raise `ValueError` where no client can send `key`, which `name` is called. The error does not show it."""
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise ValueError(f"{name} has characters beside printable ASCII without spaces, which alone are allowed")


class _Gate:
    """Middleware that answers a request itself if `refusal` of its headers is a response."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Headers], Response | None]) -> None:
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)


class _Stream(StreamingResponse):
    """Events of an answer, which is wanted as long as they are sent."""

    def __init__(self, events: AsyncIterator[bytes], wanted: AbstractContextManager[object]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._wanted = wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._wanted:
            await super().__call__(scope, receive, send)


def make_app(service: Service) -> FastAPI:
    """The application. `app.state.answering` has the answers under way.

    Raises:
        ValueError: the model has no tokenizer, or no client can send the key.
    """
    check_api_key("key", service.key)
    scheduler, tokens = service.scheduler, threading.Lock()
    if scheduler.runtime.tokenizer is None:
        raise ValueError(f"{service.model!r} has no tokenizer, and a server answers in text")
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    under_way: set[Answering] = set()
    app.state.answering = under_way
    # The queue has a limit of its own; this one is of prompts on their way there.
    places = asyncio.Semaphore(scheduler.max_running + scheduler.max_waiting)
    registry, created = registry_of(scheduler), Replies(model=service.model, chat=True).created
    page = files("tiered.serving").joinpath("page.html").read_text(encoding="utf-8")
    for name, text in (("model", service.model), ("policy", scheduler.runtime.policy), ("example", service.example)):
        page = page.replace(f"<!-- {name} -->", html.escape(str(text)))

    def check_key(request: Request) -> None:
        if service.key is None:
            return
        scheme, _, borne = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(borne.strip().encode(), service.key.encode()):
            raise RefusedBody(
                "no API key, or a wrong one: Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )

    def refusal(headers: Headers) -> Response | None:
        if service.hosts is not None:
            host = re.sub(r":\d*$", "", headers.get("host", "")).strip("[]").lower()
            if host not in service.hosts:
                what = f"the Host header names {host!r:.80}; allowed: {', '.join(service.hosts)}"
                return refused(RefusedBody(what, code="invalid_host"))
        return refused(ClosedError("the server ends")) if scheduler.closed else None

    def check_model(model: str | None) -> None:
        if model not in (None, service.model):
            what = f"no model {model!r:.80} is served here, but {service.model!r}"
            raise RefusedBody(what, "model", status=404, code="model_not_found")

    async def answer(request: Request, *, chat: bool) -> Response:
        check_key(request)
        body = read_json(await _body_of(request, service.limits.body))
        mask = scheduler.runtime.model.mask_token_id
        wanted = read_body(body, chat=chat, defaults=service.defaults, limits=service.limits, mask_token_id=mask)
        check_model(wanted.model)
        if places.locked():
            raise BusyError("too many prompts are read at a time")
        async with places:
            calls = await run_in_threadpool(asked_calls, scheduler, wanted, service.limits, tokens)
        answering, replies = Answering(scheduler, wanted, calls), Replies(model=service.model, chat=chat)
        gone = _gone(request)
        if wanted.stream:
            return _Stream(answering.streamed(replies, gone), going_on(answering))
        with going_on(answering):
            return JSONResponse(await answering.gathered(replies, gone))

    @contextmanager
    def going_on(answering: Answering) -> Iterator[None]:
        under_way.add(answering)
        try:
            with answering:
                yield
        finally:
            under_way.discard(answering)

    async def told_of(request: Request, *, chat: bool) -> Response:
        try:
            return await answer(request, chat=chat)
        except Exception as error:
            return refused(error)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await told_of(request, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await told_of(request, chat=False)

    looking = partial(app.api_route, methods=["GET", "HEAD"])

    @looking("/v1/models")
    async def models(request: Request) -> Response:
        check_key(request)
        return JSONResponse({"object": "list", "data": [_model(service.model, created)]})

    @looking("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        check_key(request)
        check_model(name)
        return JSONResponse(_model(service.model, created))

    @looking("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @looking("/metrics")
    async def metrics(request: Request) -> Response:
        check_key(request)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @looking("/")
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"})

    async def on_error(request: Request, error: Exception) -> Response:
        return refused(error)

    for kind in (HTTPException, RefusedBody, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(_Gate, refusal=refusal)
    return app


def refused(error: Exception) -> Response:
    """What a request gets in place of an answer."""
    if isinstance(error, HTTPException):
        body = error_body(str(error.detail), "invalid_request_error")
        return JSONResponse(body, error.status_code, error.headers)
    if isinstance(error, Gone | ClientDisconnect):
        return Response(status_code=499)
    status, body = told(logged(error))
    return JSONResponse(body, status, _HEADERS.get(status))


_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "tiered"}


async def _body_of(request: Request, most: int) -> bytes:
    """The body, of which no more than `most` bytes are read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a browser asks first before it sends this to another site's server
        raise RefusedBody(f"the body is application/json, not {kind or 'of no type'!r:.80}", status=415)
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise RefusedBody(f"the body is larger than {most} bytes", status=413)
                parts.append(part)
    except TimeoutError:
        raise RefusedBody(f"the body did not come in {_BODY_SECONDS:g} s", status=408) from None
    return b"".join(parts)


def _gone(request: Request) -> Callable[[], Awaitable[object]]:
    """A function that returns once the client of `request` has gone. Its body was read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return gone


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
        self._answering: set[Answering] = app.state.answering
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
