"""The HTTP server: OpenAI's endpoints, health, metrics and the page, over one scheduler."""

import asyncio
import hmac
import math
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from tiered.serving.answering import Answering, Gone, asked_calls, logged
from tiered.serving.metrics import registry_of
from tiered.serving.openai_fields import Limits, RefusedBody, read_body, read_json
from tiered.serving.replies import Replies, error_body, told
from tiered.serving.scheduler import Scheduler

LOCAL = ("127.0.0.1", "localhost", "::1")
_BODY_SECONDS = 30.0
_AGAIN_SECONDS = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is served, and to whom.

    Attributes:
        scheduler: answers; it is started and closed by who serves.
        model: the name that it is served under.
        defaults: options of `generate` that a request may overrule.
        limits: of a request.
        key: that requests must bear; None: none.
        hosts: names that the server may be called by; None: any. A page of somebody else's, in a browser here, could
            call a local server by a name of its own.
    """

    scheduler: Scheduler
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    key: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] | None = None


def make_app(service: Service) -> FastAPI:
    """The application.

    Raises:
        ValueError: the model has no tokenizer.
    """
    scheduler, tokens = service.scheduler, threading.Lock()
    if scheduler.runtime.tokenizer is None:
        raise ValueError(f"{service.model!r} has no tokenizer, and a server answers in text")
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if service.hosts is not None:
        hosts = [f"[{host}]" if ":" in host else host for host in service.hosts]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    registry, created = registry_of(scheduler), Replies(model=service.model, chat=True).created
    page = files("tiered.serving").joinpath("page.html").read_text(encoding="utf-8")

    def check_key(request: Request) -> None:
        if service.key is None:
            return
        scheme, _, borne = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(borne.strip().encode(), service.key.encode()):
            raise RefusedBody(
                "no API key, or a wrong one: Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )

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
        calls = await run_in_threadpool(asked_calls, scheduler, wanted, service.limits, tokens)
        answering, replies = Answering(scheduler, wanted, calls), Replies(model=service.model, chat=chat)
        gone = _gone(request)
        if wanted.stream:
            stream = answering.streamed(replies, gone)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        with answering:
            return JSONResponse(await answering.gathered(replies, gone))

    async def told_of(request: Request, *, chat: bool) -> Response:
        try:
            return await answer(request, chat=chat)
        except Exception as error:
            return await on_error(request, error)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await told_of(request, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await told_of(request, chat=False)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        check_key(request)
        return JSONResponse({"object": "list", "data": [_model(service.model, created)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        check_key(request)
        check_model(name)
        return JSONResponse(_model(service.model, created))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "closed"}, 503) if scheduler.closed else JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_key(request)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"})

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)
        if isinstance(error, Gone | ClientDisconnect):
            return Response(status_code=499)
        status, body = told(logged(error))
        headers = {"Retry-After": _AGAIN_SECONDS} if status in (429, 503) else None
        return JSONResponse(body, status, headers)

    for kind in (HTTPException, RefusedBody):
        app.add_exception_handler(kind, on_error)
    return app


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
    """What returns once nobody listens to `request`, whose body was read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return gone


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM: then takes no more, refuses what waits, and ends once what runs is answered."""

    def __init__(self, service: Service, *, grace_seconds: float = 30.0) -> None:
        """`grace_seconds`: that running requests have once a signal has come."""
        self._scheduler = scheduler = service.scheduler
        most = scheduler.max_running + scheduler.max_waiting + 64  # beside those that just look
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_level="warning",
                access_log=False,
                lifespan="off",
                limit_concurrency=most,
                timeout_graceful_shutdown=math.ceil(grace_seconds),
                server_header=False,
            )
        )

    def serve_at(self, listening: socket.socket) -> None:
        """Start the scheduler and answer at a socket that listens; until a signal comes."""
        with self._scheduler:
            self.run(sockets=[listening])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn; a signal that is heard is not raised again at the end."""
        # Not in the handler itself, which may have interrupted a thread that holds the scheduler's lock.
        threading.Thread(target=self._scheduler.drain, args=(f"the server ends ({signal.Signals(sig).name})",)).start()
        self.force_exit, self.should_exit = self.should_exit and sig == signal.SIGINT, True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`; port 0: at a free one. Raises `OSError` where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
