"""The embedded tasks through the harness, end to end and without a network: its score is that of `score_examples`."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness_tasks import METRIC, main, write_tasks
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from training.tasks import Example, sample, split_of
from workloads.scoring import score_examples

import tiered
from tiered.evaluation import TieredLM
from tiered.evaluation import __main__ as command
from tiered.runtime import Runtime

TASKS = {"sort": 16, "chain": 6}
EXAMPLES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks that the model fails now and then when it commits much at once."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, tasks=list(TASKS), examples=EXAMPLES, seed=2)
    for task, size in TASKS.items():  # of one size each, which no one call gives
        write_tasks(folder / "other", tasks=[task], examples=EXAMPLES, seed=2, size=size)
        (folder / "other" / f"{task}.jsonl").replace(folder / f"{task}.jsonl")
    shutil.rmtree(folder / "other")
    return folder


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained("embedded", policy="none")


def examples(task: str) -> list[Example]:
    return [sample(task, "test", 2 + number, size=TASKS[task]) for number in range(EXAMPLES)]


@pytest.mark.parametrize(("policy", "batch_size"), [("none", 1), ("fast_dllm_prefix", 12), ("polestar", 5)])
def test_the_score_is_that_of_score_examples(
    folder: Path, runtime: Runtime, policy: str, batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    other = runtime.with_policy(policy)
    results: Any = simple_evaluate(
        TieredLM(other, batch_size=batch_size, confidence_threshold=0.5),
        tasks=["tiered_embedded"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    scores = {task: score_examples(other, examples(task), confidence_threshold=0.5) for task in TASKS}
    found = results["results"]
    assert {task: found[f"tiered_embedded_{task}"]["exact_match,none"] for task in TASKS} == {
        task: one.exact_match for task, one in scores.items()
    }
    correct = sum(one.correct for one in scores.values())
    assert found["tiered_embedded"]["exact_match,none"] == correct / (EXAMPLES * len(TASKS))
    assert 0 < correct < EXAMPLES * len(TASKS)  # a score that a mistake would change
    totals = results["config"]["totals"]
    assert totals["sequences"] == EXAMPLES * len(TASKS)
    assert totals["forwards"] == sum(sum(one.forwards) for one in scores.values())


def test_the_folder_holds_examples_of_the_test_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "new" / "tasks"
    assert main([str(folder), "--tasks", "lookup", "copy", "--examples", "5", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "tiered_embedded tiered_embedded_lookup tiered_embedded_copy\n"
    assert sorted(path.name for path in folder.iterdir()) == [
        "_tiered_embedded.yaml", "copy.jsonl", "copy.yaml", "lookup.jsonl", "lookup.yaml", "metric.py",
    ]  # fmt: skip
    for task in ("lookup", "copy"):
        rows = [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]
        assert [Example(**row) for row in rows] == [sample(task, "test", seed) for seed in range(3, 8)]
        assert all(split_of(row["prompt"]) == "test" for row in rows)
    with pytest.raises(SystemExit):
        main([str(folder), "--tasks", "lokup"])
    assert "unknown task 'lokup'; did you mean 'lookup'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="examples = 0"):
        write_tasks(folder, examples=0)


def test_white_space_alone_is_no_mistake():
    doc, metric = {"task": "copy", "prompt": "copy: Ada Ben", "answer": "Ada Ben"}, {}
    exec(METRIC, metric)
    for text, right in (("Ada Ben", 1.0), (" Ada\n Ben", 1.0), ("AdaBen", 0.0), ("ada Ben", 0.0), ("Ada Ben.", 0.0)):
        assert metric["process_results"](doc, [text]) == {"exact_match": right}


def test_the_command_line(
    folder: Path, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Less the minute in which the harness reads thousands of task files of its own.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    arguments = ["pretrained=embedded", "policy=polestar", "policy_top_m=1", "confidence_threshold=0.5", "batch_size=4"]
    flags = [
        *("--model_args", ",".join(arguments), "--apply_chat_template"),
        *("--tasks", "tiered_embedded_sort", "--include_path", str(folder)),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
    ]
    monkeypatch.setattr(sys, "argv", ["evaluation", "run", *flags])
    monkeypatch.chdir(tmp_path)
    assert command.main() == 0
    other = runtime.with_policy("polestar", top_m=1)
    score = score_examples(other, examples("sort"), confidence_threshold=0.5).exact_match
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["results"]["tiered_embedded_sort"]["exact_match,none"] == score and 0 < score < 1
    assert f"|{round(score, 4):g}|" in capsys.readouterr().out.replace(" ", "")
    assert results["config"]["model"] == "tiered" and "top_m=1" in results["config"]["policy"]
    (log,) = (tmp_path / "out").rglob("samples_*.jsonl")
    assert len(log.read_text().splitlines()) == EXAMPLES


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        (["run", "--tasks", "gsm8k"], ["--model", "tiered"]),
        (["--tasks", "gsm8k"], ["--model", "tiered"]),
        (["run", "--model", "hf", "--tasks", "gsm8k"], []),
        (["run", "--model=hf", "--tasks", "gsm8k"], []),
        (["run", "-M", "hf", "--tasks", "gsm8k"], []),
        (["run", "--config", "mine.yaml"], []),
        (["ls", "tasks"], []),
        (["run"], []),
        (["--help"], []),
        ([], []),
    ],
)
def test_the_model_is_ours_unless_another_is_named(
    arguments: list[str], added: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: None)
    monkeypatch.setattr(sys, "argv", ["evaluation", *arguments])
    assert command.main() == 0 and sys.argv == ["evaluation", *arguments, *added]


def test_without_the_harness(tmp_path: Path):
    code = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'", name=name)

sys.meta_path.insert(0, Missing())
import tiered.evaluation
try:
    tiered.evaluation.TieredLM
except ImportError as error:
    print(error)
from tiered.evaluation.__main__ import main
status = main()
assert "torch" not in sys.modules
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and re.fullmatch(r"lm_eval is not installed: pip install .*\[eval\].*\n", done.stdout)
    assert done.stderr == f"tiered.evaluation: error: {done.stdout}"


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail() -> None:
        raise ValueError("unknown model argument 'polcy'")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    monkeypatch.setattr(sys, "argv", ["evaluation", "run", "--tasks", "x"])
    assert command.main() == 2
    assert capsys.readouterr().err == "tiered.evaluation: error: unknown model argument 'polcy'\n"
    assert sys.argv[-2:] == ["--model", "tiered"]
