"""The server over loopback: OpenAI's client and curl get the runtime's answers, and errors have OpenAI's shape. After
any request nothing is left behind, and the next answer is right."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness_tasks import write_tasks
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from serving import Served, serving
from training.tasks import sample
from workloads.scoring import score_examples

import tiered
from tiered.cli.main import main
from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.runtime import Runtime
from tiered.serving.metrics import registry_of
from tiered.serving.openai_fields import Limits
from tiered.serving.scheduler import Scheduler

PROMPTS = ["sort: Nora Ben Ivan Cleo", "reverse: Max Ada Zoe", "copy: Tara Uma Vera Will Xena"]
TOKENS = 64
JSON = {"Content-Type": "application/json"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# An answer that takes a second or more.
LONG: dict[str, Any] = {"max_tokens": 512, "extra_body": {"stop_at_eos": False}}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with tiered.from_pretrained("embedded", policy="fast_dllm_dual") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def served(runtime: Runtime) -> Iterator[Served]:
    with serving(runtime, limits=Limits(body=20_000, choices=4)) as served:
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


def alone(runtime: Runtime, prompt: str, **options: Any) -> str:
    text = runtime.generate(prompt, max_new_tokens=TOKENS, **options).text
    assert text is not None
    return text[0]


def check_answers(served: Served, runtime: Runtime) -> None:
    """Nothing is left behind, and the next answer is right."""
    weights = dict.fromkeys(Tier, 0) | {Tier.DEVICE: runtime.ledger.held(Tier.DEVICE, Account.WEIGHTS)}
    assert served.held() == weights
    body = {"messages": chat(PROMPTS[0]), "max_tokens": TOKENS}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == alone(runtime, PROMPTS[0])
    assert served.held() == weights


def test_chats_are_answered_as_by_the_runtime(client: openai.OpenAI, runtime: Runtime):
    answer = client.chat.completions.create(model="embedded", messages=chat(PROMPTS[0]), max_completion_tokens=TOKENS)
    assert answer.choices[0].message.content == alone(runtime, PROMPTS[0]) == "Ben Cleo Ivan Nora"
    assert answer.choices[0].finish_reason == "stop" and answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 4, 12)
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert client.models.retrieve("embedded").owned_by == "tiered"


def test_choices_have_seeds_of_their_own_and_options_stand_in_the_extra_body(client: openai.OpenAI, runtime: Runtime):
    options: dict[str, Any] = {"temperature": 4.0, "steps": 32}
    answer = client.chat.completions.create(
        model="embedded", messages=chat(PROMPTS[1]), max_tokens=TOKENS, n=3, seed=7, temperature=4.0,
        extra_body={"steps": 32},
    )  # fmt: skip
    expected = [alone(runtime, PROMPTS[1], **options, seed=7 + index) for index in range(3)]
    assert [choice.message.content for choice in answer.choices] == expected and len({*expected}) > 1


def test_completions_continue_text_and_ids_as_they_stand(client: openai.OpenAI, runtime: Runtime):
    texts = [f"<|user|>{prompt}<|assistant|>" for prompt in PROMPTS[:2]]
    expected = [alone(runtime, prompt) for prompt in PROMPTS[:2]]
    answer = client.completions.create(model="embedded", prompt=texts, max_tokens=TOKENS)
    assert [choice.text for choice in answer.choices] == expected
    assert runtime.tokenizer is not None
    ids = runtime.tokenizer(texts)["input_ids"]
    assert [choice.text for choice in client.completions.create(
        model="embedded", prompt=ids, max_tokens=TOKENS).choices] == expected  # fmt: skip


def test_a_stream_brings_final_text_and_the_sums(client: openai.OpenAI, runtime: Runtime):
    chunks = [*client.chat.completions.create(
        model="embedded", messages=chat(PROMPTS[2]), max_tokens=TOKENS, n=2, stream=True,
        stream_options={"include_usage": True}, extra_body={"block_length": 2},
    )]  # fmt: skip
    texts, ends = ["", ""], ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [alone(runtime, PROMPTS[2], block_length=2)] * 2 and ends == ["stop", "stop"]
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 3, "in pieces"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10


def test_a_stop_string_ends_an_answer_and_its_tokens(client: openai.OpenAI, served: Served):
    counts = served.scheduler.counts
    ended, tokens = counts.ended.copy(), counts.tokens
    answer = client.chat.completions.create(
        model="embedded", messages=chat(PROMPTS[2]), max_tokens=TOKENS, stop=[" Vera"]
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Tara Uma", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    answer = client.chat.completions.create(model="embedded", messages=chat(PROMPTS[2]), max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Tara Uma Vera", "length")
    served.held()
    assert not served.scheduler.running
    assert counts.ended - ended == {"done": 2} and counts.tokens == tokens + 5


@pytest.mark.parametrize("stop_at_eos", [True, False])
def test_a_stop_token_ends_an_answer_as_in_the_library(client: openai.OpenAI, runtime: Runtime, stop_at_eos: bool):
    assert runtime.tokenizer is not None
    (vera,) = runtime.tokenizer.encode(" Vera", add_special_tokens=False)
    extra = {"stop_tokens": [vera], "stop_at_eos": stop_at_eos}
    answer = client.chat.completions.create(
        model="embedded", messages=chat(PROMPTS[2]), max_tokens=TOKENS, extra_body=extra
    )
    out = runtime.generate(chat(PROMPTS[2]), max_new_tokens=TOKENS, **extra)
    assert [answer.choices[0].message.content] == out.text == ["Tara Uma"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == out.timings.tokens == 2


def test_drafts_come_if_they_are_asked_for(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model="embedded", messages=chat(PROMPTS[0]), max_tokens=TOKENS, stream=True,
        extra_body={"stream_options": {"include_drafts": True}},
    )  # fmt: skip
    drafts = [chunk.draft for chunk in stream if not chunk.choices]  # type: ignore[attr-defined]
    assert all(len(draft["tokens"]) == len(draft["open"]) == 32 and draft["columns"] == TOKENS for draft in drafts)
    assert [sum(draft["open"]) for draft in drafts] == [*range(31, 31 - len(drafts), -1)]
    assert "".join(drafts[-1]["tokens"]).startswith("Ben Cleo Ivan Nora")
    device = drafts[0]["memory"]["device"]
    assert device["bytes"] == sum(device["accounts"].values()) > device["accounts"]["weights"] > 0


def test_a_length_is_rounded_up_once():
    with tiered.from_pretrained("embedded-blocks") as runtime, serving(runtime) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        stream = client.chat.completions.create(
            model="embedded", messages=chat(PROMPTS[0]), max_tokens=33, stream=True,
            extra_body={"stream_options": {"include_drafts": True}},
        )  # fmt: skip
        drafts = [chunk.draft for chunk in stream if not chunk.choices]  # type: ignore[attr-defined]
    assert drafts and all((draft["columns"], len(draft["tokens"])) == (33, 8) for draft in drafts)


def test_curl(served: Served):
    body = json.dumps({"messages": chat(PROMPTS[0]), "max_tokens": TOKENS})
    call = ["curl", "--silent", "--fail-with-body", "--max-time", "60", "-H", "Content-Type: application/json"]
    told = subprocess.run([*call, "-d", body, f"{served.url}/v1/chat/completions"], capture_output=True, text=True)
    assert told.returncode == 0 and json.loads(told.stdout)["choices"][0]["message"]["content"] == "Ben Cleo Ivan Nora"
    told = subprocess.run([*call, "-d", body, f"{served.url}/v1/nothing"], capture_output=True, text=True)
    assert told.returncode == 22 and json.loads(told.stdout)["error"]["message"] == "Not Found"


def test_metrics_and_health(served: Served, client: openai.OpenAI):
    client.chat.completions.create(model="embedded", messages=chat(PROMPTS[0]), max_tokens=TOKENS)
    told = httpx.get(f"{served.url}/metrics").text
    found = {name: float(value) for name, value in re.findall(r"^(\S+) ([\d.e+]+)$", told, re.MULTILINE)}
    counts = served.scheduler.counts
    assert found["tiered_answer_tokens_total"] == counts.tokens > 0
    assert found["tiered_tokens_per_forward"] == pytest.approx(counts.tokens / counts.taken)
    assert found['tiered_tier_bytes{tier="device"}'] > 0 and found["tiered_requests_running"] == 0
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}


def test_bytes_of_streamed_weights_count_as_moved():
    memory = MemoryBudget(device="6MiB")
    with tiered.from_pretrained("embedded", policy="none", weights="raw", memory=memory) as runtime:
        scheduler = Scheduler(runtime)
        scheduler.submit(runtime.prepare(chat(PROMPTS[0]), max_new_tokens=TOKENS))
        scheduler.run()
        told = registry_of(scheduler).get_sample_value(
            "tiered_moved_bytes_total", {"source": "host", "destination": "device"}
        )
        assert told == runtime.ledger.moved[Tier.HOST, Tier.DEVICE] > 0


@pytest.mark.parametrize(
    ("request_", "status", "field", "words"),
    [
        ({"json": {}}, 400, "messages", "messages is missing"),
        ({"json": {"messages": chat("x"), "model": "gpt"}}, 404, "model", "model 'gpt' is not served here"),
        ({"json": {"messages": chat("x"), "block_size": 5, "max_new_tokens": 12}}, 400, "max_new_tokens", "10 or 15"),
        ({"json": {"messages": chat("x"), "commit": "treshold"}}, 400, "commit", "did you mean 'threshold'"),
        ({"content": json.dumps({"\ud800": 1, "messages": []}), "headers": JSON}, 400, "\ud800", "unknown field"),
        ({"json": {"messages": chat("x"), "diffusion_steps": -1}}, 400, "diffusion_steps", "steps = -1"),
        ({"content": json.dumps({"messages": chat("\ud800")}), "headers": JSON}, 400, "messages", "surrogate"),
        ({"url": COMPLETIONS, "json": {"prompt": [5, 4000]}}, 400, "prompt", "token id 4000 is out of range"),
        ({"json": {"messages": chat("x" * 21_000)}}, 413, None, "larger than 20000 bytes"),
        ({"content": "{", "headers": JSON}, 400, None, "not JSON"),
        ({"content": "{}", "headers": {"Content-Type": "text/plain"}}, 415, None, "Content-Type is 'text/plain'"),
        ({"content": b"{}", "headers": {}}, 415, None, "Content-Type is missing"),
        ({"json": {}, "headers": {"Host": "evil.example"}}, 400, None, "names 'evil.example'; allowed: 127.0.0.1"),
        ({"url": "/nothing", "json": {}}, 404, None, "Not Found"),
        ({"method": "PUT", "json": {}}, 405, None, "Method Not Allowed"),
        ({"url": "/", "json": {}}, 405, None, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_errors_have_openais_shape(
    served: Served, request_: dict[str, Any], status: int, field: str | None, words: str
):
    told = httpx.request(**{"method": "POST", **request_, "url": served.url + request_.get("url", CHATS)})
    assert told.status_code == status
    error = told.json()["error"]
    assert {*error} == {"message", "type", "param", "code"} and error["param"] == field
    assert words in error["message"]
    assert (status == 405) == ("Allow" in told.headers)


@pytest.mark.parametrize("chats", [True, False])
def test_a_prompt_that_is_too_long_has_openais_error_code(runtime: Runtime, chats: bool):
    with serving(runtime, limits=Limits(prompt_tokens=50)) as served:
        for count in (100, 9_000):
            source = {"messages": chat("0" * count)} if chats else {"prompt": "0" * count}
            told = httpx.post(served.url + (CHATS if chats else COMPLETIONS), json={**source, "max_tokens": 8})
            error = told.json()["error"]
            assert (told.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == ("messages" if chats else "prompt")


def test_any_seed_of_64_bits_is_taken(client: openai.OpenAI):
    for seed in (-(2**63), -1, 2**62, 2**63 - 1):
        call: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "seed": seed, "n": 2, "temperature": 1.0}
        texts = [
            [choice.text for choice in client.completions.create(model="embedded", **call).choices] for _ in range(2)
        ]
        assert texts[0] == texts[1]


def test_every_readable_path_has_a_head(served: Served):
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/embedded"):
        told = httpx.head(served.url + path)
        assert (told.status_code, told.content) == (200, b"") and int(told.headers["Content-Length"]) > 0


def test_the_clients_own_errors(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="tools is not supported here"):
        client.chat.completions.create(
            model="embedded", messages=chat("x"), tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_a_key_is_asked_for(runtime: Runtime):
    with serving(runtime, key="secret") as served:
        for key, right in (("secret", True), ("wrong", False)):
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
            if right:
                assert [model.id for model in client.models.list()] == ["embedded"]
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.completions.create(model="embedded", prompt="x")
        told = httpx.get(f"{served.url}/metrics")
        assert (told.status_code, told.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.mark.parametrize("key", ["sécret", "two words", "line\n", "\udce9"])
def test_a_key_that_no_client_can_send_is_refused_at_the_start(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TIERED_API_KEY", key)
    assert main(["serve", "no model is looked for"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tiered: error: TIERED_API_KEY has characters") and told.count("\n") == 1 and key not in told


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("embedded", ["--commit", "foo"], "unknown commit rule 'foo'"),
        ("embedded", ["--max-new-tokens", "33"], "33 is not a multiple of block_length = 32"),
        ("embedded", ["--stop-tokens", "9999"], "stop_tokens [9999]"),
        ("embedded-blocks", ["--block-length", "4"], "made for blocks of 8 (config.json): 8 is allowed"),
    ],
)
def test_defaults_that_no_request_could_have_are_refused_at_the_start(
    model: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", model, *options]) == 2
    assert words in capsys.readouterr().err


def test_a_request_that_never_fits_is_refused_with_the_numbers(runtime: Runtime):
    cap = runtime.ledger.held(Tier.DEVICE) + (2 << 20)
    small = tiered.from_pretrained("embedded", policy="none", memory=MemoryBudget(device=cap))
    with small, serving(small) as served:
        url = f"{served.url}/v1/chat/completions"
        told = httpx.post(url, json={"messages": chat("x " * 900), "max_tokens": 1024}, timeout=60)
        error = told.json()["error"]
        assert (told.status_code, error["code"], error["tier"]) == (400, "tier_capacity", "device")
        assert error["needed"] > error["available"] > 0 and "needs" in error["message"]
        check_answers(served, small)


def test_a_full_queue_and_a_late_answer_are_errors(runtime: Runtime):
    with serving(runtime, max_running=1, max_waiting=1) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
        call: dict[str, Any] = {"model": "embedded", "messages": chat(PROMPTS[0]), "stream": True, **LONG}
        with client.chat.completions.create(**call) as first, client.chat.completions.create(**call):
            next(iter(first))
            with pytest.raises(openai.RateLimitError, match="1 requests wait"):
                client.chat.completions.create(**call)
        check_answers(served, runtime)
    with serving(runtime, seconds=0.05) as served:
        told = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x", "max_tokens": 2048}, timeout=60)
        assert (told.status_code, told.json()["error"]["code"]) == (504, "timeout")


def sent(served: Served, text: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    connection.sendall(text)
    return connection


def posted(body: bytes, length: int | None = None) -> bytes:
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_cancels_its_request(served: Served, runtime: Runtime, stream: bool):
    before = served.scheduler.counts.ended["cancelled"]
    body = {"messages": chat(PROMPTS[0]), "stream": stream, "max_tokens": 2048, "stop_at_eos": False}
    with sent(served, posted(json.dumps(body).encode())) as connection:
        deadline = time.monotonic() + 30
        while not served.scheduler.running and time.monotonic() < deadline:
            time.sleep(0.01)
        if stream:
            assert b"200 OK" in connection.recv(100)
    served.held()
    assert served.scheduler.counts.ended["cancelled"] == before + 1
    check_answers(served, runtime)


def test_a_body_that_is_cut_off(served: Served, runtime: Runtime):
    for text in (posted(b'{"messages"', 500), b"POST /v1/comp", b"\x16\x03\x01\x02\x00", posted(b"{}", 10**12)):
        sent(served, text).close()
    check_answers(served, runtime)


def garbage(generator: random.Random) -> dict[str, Any]:
    """A body that may be anything."""
    values = [
        None,
        -1,
        0,
        1,
        1e99,
        "x",
        [],
        {},
        [[]],
        True,
        "\ud800",
        10**30,
        ["\0"] * 3,
        [{"role": "user"}],
        {"a": {"b": []}},
    ]
    names = [
        *("messages", "prompt", "max_tokens", "n", "stop", "seed", "temperature", "top_p", "top_k", "steps", "commit"),
        *("block_length", "stream", "stream_options", "cfg_scale", "confidence_threshold", "tools", "what", "prior"),
    ]
    body = {name: generator.choice(values) for name in generator.sample(names, generator.randrange(6))}
    if generator.random() < 0.5:
        body |= {"messages": chat("x"), "max_tokens": generator.choice([1, 8, -3])}
    return body


def check_garbage(served: Served, runtime: Runtime, count: int) -> None:
    generator = random.Random(count)
    with httpx.Client(base_url=served.url, timeout=60) as client:
        for _ in range(count):
            path = generator.choice(["/v1/chat/completions", "/v1/completions"])
            if generator.random() < 0.2:
                body = generator.randbytes(generator.randrange(200))
            else:
                body = json.dumps(garbage(generator)).encode()
            told = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert told.status_code in (200, 400), (body, told.text)
            assert told.status_code == 200 or told.json()["error"]["message"]
    check_answers(served, runtime)


def test_garbage_is_refused(served: Served, runtime: Runtime):
    check_garbage(served, runtime, 60)


@pytest.mark.long
def test_much_garbage_is_refused(served: Served, runtime: Runtime):
    check_garbage(served, runtime, 10_000)


@pytest.mark.slow
def test_on_sigterm_the_command_finishes_running_requests_and_refuses_waiting_ones():
    command = [sys.executable, "-m", "tiered", "serve", "embedded", "--port", "0", "--max-running", "1"]
    with subprocess.Popen(
        [*command, "--policy", "none"], stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            url = line.split()[-1]
            assert line == f"tiered: embedded at {url}\n"
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
            long = sample("lookup", "test", 0, size=512)  # seconds
            call: dict[str, Any] = {"model": "embedded", "stream": True, "max_tokens": TOKENS}
            running = iter(client.chat.completions.create(**call, messages=chat(long.prompt)))
            waiting = iter(client.chat.completions.create(**call, messages=chat(PROMPTS[0])))
            for each in (running, waiting):
                next(each)
            process.send_signal(signal.SIGTERM)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in running) == long.answer
            with pytest.raises(openai.APIError, match="the server ends"):
                list(waiting)
            assert process.wait(30) == 0
            assert process.stderr.read() == ""
            with pytest.raises(openai.APIConnectionError):
                client.models.list()
        finally:
            process.kill()


def test_the_harness_scores_through_it_as_the_tasks_do(
    served: Served, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Of one size, at which the model fails now and then when it commits much at once.
    names = write_tasks(tmp_path / "tasks", tasks=["sort"], examples=8, seed=2, size=16)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    results: Any = simple_evaluate(
        "local-chat-completions",
        model_args={"base_url": f"{served.url}/v1/chat/completions", "model": "embedded", "num_concurrent": 4},
        gen_kwargs={"confidence_threshold": 0.5},
        tasks=[*names[:1]],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    examples = [sample("sort", "test", 2 + number, size=16) for number in range(8)]
    expected = score_examples(runtime, examples, confidence_threshold=0.5, max_new_tokens=32)
    assert results["results"][names[0]]["exact_match,none"] == expected.exact_match
    assert 0 < expected.correct < 8, "a score that a mistake would change"


def test_an_answered_request_is_answered_again_under_any_budget(tmp_path: Path):
    """Four requests in a row, and then a call of the library: memory that a request leaves fails no later one."""
    prompt = "sort: " + "Ada Ben Cleo Eva Gus Hana Ivan Nora Leo Mia " * 6
    draw, statuses = random.Random(1), set()
    options: dict[str, Any] = {"max_tokens": 32, "block_length": 8, "seed": 3}
    with tiered.from_pretrained("embedded", policy="fast_dllm_dual", weights="raw") as free:
        expected = free.generate(prompt, max_new_tokens=32, block_length=8, seed=3, raw=True).text
    budgets = [("4000KiB", "4872KiB", "32MiB")]
    budgets += [
        (f"{draw.randrange(3600, 9000)}KiB", f"{draw.randrange(1000, 8000)}KiB", draw.choice(["32MiB", 0]))
        for _ in range(5)
    ]
    for device, host, disk in budgets:
        memory = MemoryBudget(device=device, host=host, disk=disk, disk_path=tmp_path if disk else None)
        try:
            runtime = tiered.from_pretrained("embedded", policy="fast_dllm_dual", weights="raw", memory=memory)
        except TierCapacityError:
            continue
        with runtime, serving(runtime) as served:
            for _ in range(4):
                answer = httpx.post(f"{served.url}{COMPLETIONS}", json={"prompt": prompt, **options}, timeout=60)
                statuses.add((device, answer.status_code))
                if answer.status_code == 200:
                    assert [each["text"] for each in answer.json()["choices"]] == expected
            first = next(status for budget, status in statuses if budget == device)
            if first == 200:
                assert runtime.generate(prompt, max_new_tokens=32, block_length=8, seed=3, raw=True).text == expected
    assert len(statuses) == len({device for device, _ in statuses}), statuses
    assert sum(status == 200 for _, status in statuses) >= 3, statuses
