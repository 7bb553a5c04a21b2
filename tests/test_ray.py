"""Workers by Ray on a local cluster: answers are those of single calls, in order, whoever dies; and the server as a
deployment."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiered
from tiered.embedded.tasks import TASKS, sample
from tiered.ray import Answerer, answered, deployment

ray: Any = pytest.importorskip("ray")

OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "confidence_threshold": 0.8}
PROMPTS = [sample(task, "test", number).prompt for number in range(50) for task in [*TASKS][:6]]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 1024**2, log_to_driver=False)
    yield
    ray.shutdown()


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
def test_a_worker_that_is_killed_loses_and_doubles_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiered.ray, "Answerer", Named)  # type: ignore[attr-defined]
    rows = [{"number": number, "prompt": PROMPTS[number % len(PROMPTS)], "seed": number} for number in range(500)]
    dataset = ray.data.from_items(rows, override_num_blocks=20)
    more: dict[str, Any] = {"temperature": 0.5}
    told = answered(
        dataset, "embedded", workers=2, batch_size=10, num_cpus=1, seed="seed", policy="fast_dllm_dual",
        options=OPTIONS | more, folder=str(tmp_path),
    )  # fmt: skip
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
            assert ([row["answer"]], row["forwards"]) == (alone.text, alone.num_forwards)


@pytest.mark.long
def test_the_server_is_a_deployment():
    from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(deployment("embedded", policy="fast_dllm_dual", defaults=OPTIONS), route_prefix="/")
        body = {"messages": [{"role": "user", "content": "sort: Nora Ben Ivan Cleo"}], "stream": True}
        told = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert "Nora" in told.text and told.text.endswith("data: [DONE]\n\n")
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": []}, timeout=60)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
    finally:
        serve.shutdown()
