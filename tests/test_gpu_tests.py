"""The tests marked `gpu` as a part of a GPU day: it reports every outcome, whatever a test does to its process."""

import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAD = "import os, time, pytest\npytestmark = pytest.mark.gpu\n"
FILES = {
    "passes": "def test_it(): pass\n",
    "fails": "def test_it(): assert 1 == 2, 'one is not two'\n",
    "set_up": "@pytest.fixture\ndef bad(): raise OSError('no device')\ndef test_it(bad): pass\n",
    "clean_up": "@pytest.fixture\ndef bad():\n    yield\n    raise OSError('still there')\ndef test_it(bad): pass\n",
    "skips": "def test_it(): pytest.skip('not here')\n",
    "dies": "def test_it(): os._exit(7)\n",
    "unmarked": "",
    "no_import": "import no_such_module\n",
    "hangs": "def test_it(): time.sleep(600)\n",
}


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    # A run of its own, of no session's workers.
    for name in [name for name in os.environ if name.startswith("PYTEST")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "bench"))
    return importlib.import_module("gpu_parts.gpu_tests")


def run(part: ModuleType, folder: Path, names: list[str], *, workers: int, seconds: float) -> dict[str, Any]:
    files = []
    for name in names:
        files.append(folder / f"test_{name}.py")
        files[-1].write_text("def test_it(): pass\n" if name == "unmarked" else HEAD + FILES[name])
    notes = folder / "notes.jsonl"
    status = part.run_pytest(files, notes, workers=workers, seconds=seconds, root=folder)
    return part.figures([json.loads(line) for line in notes.read_text().splitlines()], status, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "seconds"), [(2, 60.0), (0, 6.0)])
def test_every_outcome_is_reported(part: ModuleType, tmp_path: Path, workers: int, seconds: float):
    # Another process takes the place of one that dies. A test that never ends costs no earlier outcome.
    names = [name for name in FILES if name != ("hangs" if workers else "dies")]
    row = run(part, tmp_path, names, workers=workers, seconds=seconds)
    failed = {Path(failure["test"].partition("::")[0]).stem: failure["why"] for failure in row["failures"]}
    expected = {"test_fails": "one is not two", "test_set_up": "no device", "test_no_import": "no_such_module"}
    expected |= {"test_clean_up": "still there"} | ({"test_dies": "crashed"} if workers else {})
    assert failed.keys() == expected.keys()
    assert all(words in failed[name] for name, words in expected.items())
    # The test with a failing clean-up has failed, once.
    assert (row["passed"], row["failed"], row["skipped"]) == (1, len(expected), 1)
    assert not row["ok"] and row["why"].startswith(f"{len(expected)} failed")
    assert row["unfinished"] == ([] if workers else ["test_hangs.py::test_it"])
    assert workers or row["why"].endswith("1 did not end; out of time")


def ended(test: str, outcome: str) -> list[dict[str, Any]]:
    return [
        {"what": "begun", "test": test},
        {"what": "ended", "test": test, "outcome": outcome, "seconds": 1.0, "why": "because"},
    ]


@pytest.mark.parametrize(
    ("notes", "status", "device", "why"),
    [
        (ended("a", "passed"), 0, "cuda", None),
        (ended("a", "skipped"), 0, "cpu", None),
        (ended("a", "skipped"), 0, "cuda", "none passed"),
        ([], 5, "cuda", "pytest ended with status 5; none passed"),
        (ended("a", "passed") + ended("b", "failed"), 1, "cuda", "1 failed"),
        ([*ended("a", "passed"), {"what": "begun", "test": "b"}], None, "cuda", "1 did not end; out of time"),
        (ended("a", "passed"), 2, "cuda", "pytest ended with status 2"),
        (ended("a", "passed"), -11, "cuda", "pytest ended with status -11"),
    ],
)
def test_the_verdict_of_a_run(
    part: ModuleType, notes: list[dict[str, Any]], status: int | None, device: str, why: str | None
):
    row = part.figures(notes, status, device=device)
    assert row.get("why") == why and row["ok"] is (why is None)


def test_the_files_are_those_with_gpu_tests(part: ModuleType):
    names = {path.name for path in part.gpu_files()}
    assert {"test_stored_rows.py", "test_transports.py", "test_drift.py"} <= names
    assert "test_evaluation.py" not in names


def test_pytest_ends_before_its_part(part: ModuleType):
    """Else the process is killed together with the notes of all outcomes."""
    studies = importlib.import_module("studies.gpu_day")
    assert 0.98 * studies.PARTS["gpu_tests"].seconds >= part.SECONDS + 15
