"""Workers by Ray: answers are those of single calls, in order, and a row without an answer has its error. If Ray is
installed, they run on a local cluster, also while a worker dies, and the server runs as a deployment."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from training.tasks import TASKS, sample

import tiered
from tiered.ray import Answerer, answered, deployment

OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "confidence_threshold": 0.8}
PROMPTS = [sample(task, "test", number).prompt for number in range(50) for task in [*TASKS][:6]]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray: Any = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    path = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1] / "bench")}}  # workers import this file
    memory = 200 * 1024**2
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=memory, log_to_driver=False, runtime_env=path)
    yield ray
    ray.shutdown()


def test_a_row_that_cannot_be_answered_comes_back_with_its_error():
    chat = [{"role": "user", "content": PROMPTS[0]}]
    prompts = [PROMPTS[0], "", np.array([3, 9999]), np.array(chat, dtype=object), PROMPTS[1], "x " * 5000, 5]
    column = np.empty(len(prompts), dtype=object)
    column[:] = prompts
    worker = Answerer("embedded", policy="fast_dllm_dual", options=OPTIONS)
    told = worker({"prompt": column})
    with tiered.from_pretrained("embedded", policy="fast_dllm_dual") as runtime:
        alone = [runtime.generate(prompt, **OPTIONS) for prompt in PROMPTS[:2]]
    texts = [(output.text or [""])[0] for output in alone]
    assert told["answer"] == [texts[0], "", "", texts[0], texts[1], "", ""]
    words = ["^$", "prompt 0 is empty", "token id 9999", "^$", "^$", "positions", "not int"]
    assert all(re.search(word, error) for word, error in zip(words, told["error"], strict=True)), told["error"]
    told = worker({"prompt": column[[0, 4, 4, 4]], "seed": np.array([3.0, None, float("nan"), -1], dtype=object)})
    assert told["answer"] == [texts[0], "", "", ""]
    words = ["^$", "seed = None; an int is", "seed = nan; an int is", "seed = -1"]
    assert all(re.search(word, error) for word, error in zip(words, told["error"], strict=True)), told["error"]
    with pytest.raises(ValueError, match="did you mean 'max_new_tokens'"):  # whatever the row
        Answerer("embedded", options={"max_new_token": 8})


@pytest.mark.parametrize("make", [partial(answered, None), deployment])
def test_workers_do_not_answer_on_the_cpu_unasked(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"num_gpus = 0 hides this machine's GPUs .* device='cpu'"):
        make("embedded")


class Named(Answerer):
    """Leaves the number of its process, and its rows, in a folder."""

    def __init__(self, model: str, *, folder: str, **more: Any) -> None:
        super().__init__(model, **more)
        self._folder = Path(folder)

    def __call__(self, batch: Any) -> Any:
        told = super().__call__(batch)
        with (self._folder / str(os.getpid())).open("a") as file:
            file.write("x" * len(batch["prompt"]))
        return told


@pytest.mark.long
def test_a_worker_that_is_killed_loses_and_doubles_no_answer(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiered.ray, "Answerer", Named)  # type: ignore[attr-defined]
    rows = [{"number": number, "prompt": PROMPTS[number % len(PROMPTS)], "seed": number} for number in range(500)]
    dataset = ray.data.from_items(rows, override_num_blocks=20)
    more: dict[str, Any] = {"temperature": 0.5}
    told = answered(
        dataset, "embedded", workers=2, policy="fast_dllm_dual", options=OPTIONS | more, folder=str(tmp_path)
    )
    killed: list[int] = []

    def kill() -> None:
        while not killed:
            done = {int(path.name): path.stat().st_size for path in tmp_path.iterdir()}
            if len(done) == 2 and sum(done.values()) > 100:
                killed.append(min(done))
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.05)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    answers = told.take_all()
    assert killed and len(list(tmp_path.iterdir())) > 2, "another took its place"
    assert [row["number"] for row in answers] == list(range(500))
    with tiered.from_pretrained("embedded", policy="fast_dllm_dual") as runtime:
        for row in answers:
            alone = runtime.generate(row["prompt"], **OPTIONS, **more, seed=row["seed"])
            assert ([row["answer"]], row["error"]) == (alone.text, "")


@pytest.mark.long
@pytest.mark.usefixtures("ray")
def test_the_server_is_a_deployment():
    from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(deployment("embedded", policy="fast_dllm_dual", service={"defaults": OPTIONS}), route_prefix="/")
        body = {"messages": [{"role": "user", "content": "sort: Nora Ben Ivan Cleo"}], "stream": True}
        told = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert "Nora" in told.text and told.text.endswith("data: [DONE]\n\n")
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": []}, timeout=60)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
    finally:
        serve.shutdown()
