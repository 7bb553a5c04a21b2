"""What one process of a sweep measures, against the runtime asked directly; and how it ends."""

import importlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from scoring import score_examples

import tiered
from tiered.embedded import tasks
from tiered.output import GenerationOutput

BENCH = Path(__file__).resolve().parents[1] / "bench"
OPTIONS: dict[str, Any] = {"clusters": 4, "top_m": 2, "update_threshold": 0, "codec": "raw", "cluster_layers": 1}


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def asked_directly(task: str, size: int | None, count: int, batch: int) -> dict[str, Any]:
    """The figures that no clock gives, without any of the bench's own parts."""
    examples = [tasks.sample(task, "test", 5 + number, size=size) for number in range(count)]
    examples.sort(key=lambda example: len(example.prompt))
    runtime = tiered.from_pretrained("embedded", policy="polestar", device="cpu", **OPTIONS)
    outs: list[GenerationOutput] = []
    correct = 0
    for start in range(0, count, batch):
        own = examples[start : start + batch]
        chats = [[{"role": "user", "content": example.prompt}] for example in own]
        outs.append(runtime.generate(chats, max_new_tokens=32, block_length=16, confidence_threshold=0.9))
        assert outs[-1].text is not None
        correct += sum(text == example.answer for text, example in zip(outs[-1].text, own, strict=True))
    forwards = [number for out in outs for number in out.forwards]
    return {
        "examples": count,
        "correct": correct,
        "nfe": sum(forwards) / count,
        "updates": sum(out.passes.get("update", 0) for out in outs),
        "device_bytes": max(out.memory.peak_device_bytes for out in outs),
        "host_bytes": max(out.memory.peak_host_bytes for out in outs),
        "to_device_bytes": sum(out.memory.moved.get("host->device", 0) for out in outs),
        "to_host_bytes": sum(out.memory.moved.get("device->host", 0) for out in outs),
    }


def test_a_point_is_measured_from_end_to_end_in_a_process_of_its_own(
    part: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["--policies", "polestar", "--clusters", "4", "--top-m", "2", "--update-threshold", "0"]
    command += ["--codecs", "raw", "--option", "cluster_layers=1", "--contexts", "96", "--batches", "2"]
    command += ["--confidences", "0.9", "--block-length", "16", "--seed", "5"]
    command += ["--examples", "chain=3,lookup=2", "--out", str(tmp_path)]
    code = part("sweep").main(command)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and (last["ok"], last["refused"], last["failed"]) == (1, 0, 0)
    rows = {row["task"]: row for row in pq.read_table(tmp_path / "rows.parquet").to_pylist()}
    for task, size, count in (("chain", None, 3), ("lookup", 96, 2)):
        row = rows[task]
        expected = asked_directly(task, size, count, batch=2)
        assert {name: row[name] for name in expected} == expected
        assert row["host_bytes"] > 0 and row["copy_ms"] > 0 and 0 <= row["hidden_ms"] <= row["copy_ms"]
        # An answer is part of the seconds, and its first block of two a part of it.
        assert row["ms_per_forward"] > 0 and row["seconds"] > 0 and row["tokens_per_second"] > 0
        assert 0 < row["first_block_ms"] < 1000 * row["seconds"]
    assert rows["chain"]["updates"] > 0 and rows["chain"]["to_device_bytes"] > 0


def test_what_the_library_refuses_is_told_task_by_task(part: Callable[[str], ModuleType]):
    settings: dict[str, Any] = {
        "policy": "none",
        "policy_options": {},
        "budget_bytes": None,
        "device": "cpu",
        "threads": 1,
        "tasks": {"lookup": 1, "add": 1},
        "context": 9,
        "batch": 4,
        "seed": 0,
        "confidence": None,
        "max_new_tokens": 8,
        "block_length": 8,
    }
    measure = part("sweeping.measure").measure_point
    lookup, add = measure(settings, "embedded")
    assert lookup["status"] == "refused" and "9 tokens hold" in lookup["why"] and "nfe" not in lookup
    assert add["status"] == "ok" and add["nfe"] == 8.0 and add["copy_ms"] == add["to_host_bytes"] == 0
    rows = measure(settings | {"budget_bytes": 4096, "context": 64}, "embedded")
    assert [(row["task"], row["status"]) for row in rows] == [("lookup", "refused"), ("add", "refused")]
    assert all("device tier needs" in row["why"] and "nfe" not in row for row in rows)


def test_a_worker_ends_with_the_sweep_that_started_it(part: Callable[[str], ModuleType]):
    worker = subprocess.Popen(
        part("sweeping.processes").WORKER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(BENCH)},
    )
    # The settings are none: a worker that went on would fail with a traceback, and rows on stdout there cannot be.
    out, _ = worker.communicate(b'{"settings": {}, "model": "embedded"}\n', timeout=60)
    assert worker.returncode == 1 and out == b""


def test_calls_have_as_many_examples_as_asked(part: Callable[[str], ModuleType]):
    runtime = tiered.from_pretrained("embedded", policy="none", device="cpu")
    examples = [tasks.sample("add", "test", number) for number in range(5)]
    sizes: list[int] = []

    def scores(**options: Any) -> Any:
        return score_examples(
            runtime,
            examples,
            max_new_tokens=8,
            confidence_threshold=0.9,
            watch=lambda out: sizes.append(out.sequences.shape[0]),
            **options,
        )

    assert scores(batch=2) == scores() and sizes == [2, 2, 1, 5]
    with pytest.raises(ValueError, match="batch"):
        scores(batch=0)


def test_the_figures_of_a_row_are_of_all_calls(part: Callable[[str], ModuleType]):
    runtime = tiered.from_pretrained("embedded", policy="polestar", device="cpu", update_threshold=0)
    watch, outs = part("sweeping.measure").Watch(), []
    for seed in range(2):
        chat = [{"role": "user", "content": tasks.sample("sort", "test", seed).prompt}]
        outs.append(runtime.generate(chat, max_new_tokens=32, block_length=16, confidence_threshold=0.5))
        watch(outs[-1])
    steps = [second for out in outs for second in out.timings.steps]
    assert watch.forward_ms == [1e3 * second for second in steps]
    assert watch.first_block_ms == [1e3 * out.timings.first_block for out in outs]
    ways = [way for out in outs for way in out.tiers.ways.values()]
    assert watch.copy_ms == pytest.approx(sum(way.busy_ns for way in ways) / 1e6) and watch.copy_ms > 0
    assert watch.exposed_ms == pytest.approx(sum(way.exposed_ns for way in ways) / 1e6)
    assert watch.hidden_ms == pytest.approx(sum(way.hidden_ns for way in ways) / 1e6)
