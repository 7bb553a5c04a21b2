"""Connections of the server: one without a request blocks no other, and the server's end cuts no answer."""

import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from serving import Served, serving

import tiered
from tiered.runtime import Runtime

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "sort: Nora Ben Ivan Cleo"}], "max_tokens": 32}
# An answer that takes seconds.
LONG: dict[str, Any] = CHAT | {"max_tokens": 4000, "stop_at_eos": False, "stream": True}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with tiered.from_pretrained("embedded", policy="fast_dllm_dual") as runtime:
        yield runtime


def connected(served: Served, text: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    connection.sendall(text)
    return connection


def check_served(served: Served, **headers: str) -> None:
    assert httpx.get(f"{served.url}/health", timeout=30).json() == {"status": "ok"}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "Ben Cleo Ivan Nora"


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_closed(connection: socket.socket) -> bool:
    """By the server, which has not answered."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and message of an answer in the API's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert {*error} == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["message"]


def test_connections_without_a_request_block_no_other_and_are_closed(runtime: Runtime):
    texts = [b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le"]
    limits: dict[str, Any] = {"max_running": 1, "max_waiting": 1, "key": "secret"}
    with serving(runtime, of_server={"header_seconds": 2.0}, **limits) as served, ExitStack() as held:
        connections = [held.enter_context(connected(served, texts[number % 3])) for number in range(400)]
        check_served(served, Authorization="Bearer secret")
        answers = [connection.recv(1000) for connection in connections]
    assert not any(answers[::3]), "nothing was sent, and nothing is answered"
    assert {error_of(answer) for answer in answers[1::3]} == {(408, "the headers did not arrive within 2 s")}


def test_slow_headers_behind_an_answer_time_out(runtime: Runtime):
    with serving(runtime, of_server={"header_seconds": 0.5}) as served:
        with connected(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
            assert b"200 OK" in connection.recv(1000)
            received = b""
            with pytest.raises(OSError):  # the connection is closed while drops are sent
                for _ in range(50):
                    connection.sendall(b"X")
                    connection.settimeout(0.2)
                    try:
                        received += connection.recv(1000)
                    except TimeoutError:
                        continue
                raise AssertionError("it never ends")
        assert error_of(received)[0] == 408


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000, 431),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_malformed_requests_are_refused_in_the_apis_shape(runtime: Runtime, text: bytes, status: int):
    with serving(runtime) as served, connected(served, text) as connection:
        assert error_of(connection.recv(1000))[0] == status


def test_one_connection_too_many_closes_the_oldest_without_a_request(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.serving.server.most_connections", lambda: 8)
    with serving(runtime) as served, ExitStack() as held:
        connections = [held.enter_context(connected(served, b"GET /hea")) for _ in range(12)]
        check_served(served)
        closed = [is_closed(connection) for connection in connections]
    assert 5 <= sum(closed) <= 6 and closed == sorted(closed, reverse=True)


@pytest.mark.parametrize(("grace", "signals"), [(1.0, [signal.SIGTERM]), (600.0, [signal.SIGTERM, signal.SIGTERM])])
def test_on_sigterm_the_server_refuses_requests_and_ends_streams_in_an_error(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, grace: float, signals: list[signal.Signals]
):
    with serving(runtime, of_server={"grace_seconds": grace}) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
        call: dict[str, Any] = CHAT | {"max_tokens": 4000, "extra_body": {"stop_at_eos": False}}
        streams = [client.chat.completions.create(model="embedded", stream=True, **call) for _ in range(2)]
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=LONG, timeout=60) as raw:
            wait_until(lambda: served.scheduler.running == 3)
            first, *second = signals
            served.server.handle_exit(first, None)
            wait_until(lambda: served.scheduler.closed)
            paths = ("/health", "/metrics", "/v1/models", "/v1/chat/completions") if second else ()
            for path in paths:
                told = httpx.request("POST" if "chat" in path else "GET", f"{served.url}{path}", timeout=30)
                assert (told.status_code, told.json()["error"]["code"]) == (503, "closed")
            for each in second:
                served.server.handle_exit(each, None)
            events = raw.read().decode().split("\n\n")  # raises if the body is cut
        last = json.loads(events[-2].removeprefix("data: "))
        assert events[-1] == "" and last["error"]["type"] == "server_error" and "SIGTERM" in last["error"]["message"]
        for stream in streams:
            with pytest.raises(openai.APIError, match=r"the server ends \(SIGTERM\)"):
                list(stream)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in told] == [
        "tiered: the server ends; unfinished answers end with an error: 3"
    ]
