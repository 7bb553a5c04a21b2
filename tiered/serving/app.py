"""The HTTP application over one scheduler: OpenAI's endpoints, health, metrics and the page."""

import asyncio
import hmac
import html
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tiered.serving.metrics import registry_of
from tiered.serving.openai_fields import Limits, read_body, read_json
from tiered.serving.prompts import RefusedBody
from tiered.serving.replies import Replies, error_body, error_reply
from tiered.serving.request import BusyError, ClosedError
from tiered.serving.responder import Responder, logged, prepared_calls
from tiered.serving.scheduler import Scheduler

LOCAL = ("127.0.0.1", "localhost", "::1")
_BODY_SECONDS = 30.0
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A served model and its limits.

    Attributes:
        scheduler: scheduler of the requests; the caller starts and closes it.
        model: name of the model for clients.
        defaults: options of `generate` that a request may override.
        limits: limits of a request.
        key: API key of requests, printable ASCII without spaces; None for none.
        example: prompt that the page offers.
        hosts: names allowed in the Host header; None for any. They keep out another site's page in a local browser,
            which can give this server a host name of its own.
    """

    scheduler: Scheduler
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    key: str | None = field(default=None, repr=False)
    example: str = "Why is the sky blue? Answer in two sentences."
    hosts: tuple[str, ...] | None = None


def check_api_key(name: str, key: str | None) -> None:
    """Raise `ValueError` if no client can send `key`, called `name` in the error, which does not show the key."""
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise ValueError(f"{name} has characters that are not allowed: use printable ASCII without spaces")


class _Gate:
    """Middleware that rejects a request if `refusal` of its headers is a response."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Headers], Response | None]) -> None:
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)


class _Stream(StreamingResponse):
    """Events of an answer. `responder` is open while they are sent."""

    def __init__(self, events: AsyncIterator[bytes], responder: Responder) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._responder = responder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._responder:
            await super().__call__(scope, receive, send)


class _Endpoints:
    """The endpoints of the application.

    Attributes:
        responders: answers under way.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._scheduler, self._tokens = service, service.scheduler, threading.Lock()
        self.responders: set[Responder] = set()
        # The queue has its own limit; this one counts prompts on their way there.
        self._places = asyncio.Semaphore(self._scheduler.max_running + self._scheduler.max_waiting)
        self._registry = registry_of(self._scheduler)
        self._model = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "tiered"}
        page = files("tiered.serving").joinpath("page.html").read_text(encoding="utf-8")
        shown = {"model": service.model, "policy": self._scheduler.runtime.policy, "example": service.example}
        for name, text in shown.items():
            page = page.replace(f"<!-- {name} -->", html.escape(str(text)))
        self._page = page

    def gate(self, headers: Headers) -> Response | None:
        if (hosts := self._service.hosts) is not None:
            host = re.sub(r":\d*$", "", headers.get("host", "")).strip("[]").lower()
            if host not in hosts:
                what = f"the Host header names {host!r:.80}; allowed: {', '.join(hosts)}"
                return refused(RefusedBody(what, code="invalid_host"))
        return refused(ClosedError("the server ends")) if self._scheduler.closed else None

    async def answer(self, request: Request, *, chat: bool) -> Response:
        try:
            return await self._answer(request, chat=chat)
        except Exception as error:
            return refused(error)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model)

    async def metrics(self, request: Request) -> Response:
        self._check_key(request)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def index(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"})

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        self._check_key(request)
        service, scheduler = self._service, self._scheduler
        body = read_json(await _body_of(request, service.limits.body))
        model = scheduler.runtime.model
        parsed = read_body(
            body,
            chat=chat,
            defaults=service.defaults,
            limits=service.limits,
            mask_token_id=model.mask_token_id,
            block_causal=model.shape.block_causal,
        )
        self._check_model(parsed.model)
        if self._places.locked():
            raise BusyError("too many prompts at a time; try again later")
        async with self._places:
            calls = await run_in_threadpool(prepared_calls, scheduler, parsed, service.limits, self._tokens)
        responder = Responder(scheduler, parsed, calls, self.responders)
        replies, disconnect = Replies(model=service.model, chat=chat), partial(_disconnect, request)
        if parsed.stream:
            return _Stream(responder.streamed(replies, disconnect), responder)
        with responder:
            return JSONResponse(await responder.gathered(replies, disconnect))

    def _check_key(self, request: Request) -> None:
        if (key := self._service.key) is None:
            return
        scheme, _, borne = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(borne.strip().encode(), key.encode()):
            what = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise RefusedBody(what, status=401, code="invalid_api_key")

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._service.model):
            what = f"model {model!r:.80} is not served here; allowed: {self._service.model!r}"
            raise RefusedBody(what, "model", status=404, code="model_not_found")


def make_app(service: Service) -> FastAPI:
    """The application; `app.state.responders` is the set of answers under way. Raises `ValueError` if the model has no
    tokenizer, or if no client can send the key."""
    check_api_key("key", service.key)
    if service.scheduler.runtime.tokenizer is None:
        raise ValueError(f"{service.model!r} has no tokenizer, which a server needs; add its files to the checkpoint")
    app, endpoints = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), _Endpoints(service)
    app.state.responders = endpoints.responders
    for path, chat in (("/v1/chat/completions", True), ("/v1/completions", False)):
        app.add_route(path, partial(endpoints.answer, chat=chat), methods=["POST"])
    for path, endpoint in (
        ("/v1/models", endpoints.models),
        ("/v1/models/{name:path}", endpoints.model),
        ("/health", endpoints.health),
        ("/metrics", endpoints.metrics),
        ("/", endpoints.index),
    ):
        app.add_route(path, endpoint, methods=["GET", "HEAD"])

    async def on_error(request: Request, error: Exception) -> Response:
        return refused(error)

    for kind in (HTTPException, RefusedBody, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(_Gate, refusal=endpoints.gate)
    return app


def refused(error: Exception) -> Response:
    """The response to a request that failed with `error`."""
    if isinstance(error, HTTPException):
        body = error_body(str(error.detail), "invalid_request_error")
        return _json(body, error.status_code, error.headers)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    status, body = error_reply(logged(error))
    return _json(body, status, _HEADERS.get(status))


def _json(body: Mapping[str, Any], status: int, headers: Mapping[str, str] | None) -> Response:
    """In ASCII: half a surrogate pair of a request comes back as it was written."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


async def _body_of(request: Request, most: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers need the server's consent to send this type across sites
        raise RefusedBody(
            f"Content-Type is {repr(kind) if kind else 'missing':.80}; application/json is allowed", status=415
        )
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise RefusedBody(f"the body is larger than {most} bytes, the most allowed", status=413)
                parts.append(part)
    except TimeoutError:
        raise RefusedBody(f"the body did not arrive within {_BODY_SECONDS:g} s", status=408) from None
    return b"".join(parts)


async def _disconnect(request: Request) -> None:
    """Return when the client of `request`, whose body was read, has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
