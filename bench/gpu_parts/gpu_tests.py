"""The tests marked `gpu`, by pytest in a process of its own, each outcome noted as soon as it is there."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring.provenance import ROOT

from gpu_parts.setting import Setting, checked

WORKERS = 4  # processes that share the device, so that a test that kills it takes few others along
SECONDS = 130.0  # seconds of the part that pytest has; the process needs some before and behind it
_LISTED = 40


def cases(setting: Setting) -> list[str]:
    """All of them at once: importing torch costs more than most tests."""
    return ["pytest -m gpu"]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Counts by outcome, and names of tests that failed or did not end. `ok`: there are no such tests, and a test
    passed or there is no GPU."""
    files, began = gpu_files(), time.monotonic()
    with TemporaryDirectory() as folder:
        notes = Path(folder, "notes.jsonl")
        status = run_pytest(files, notes, workers=0 if setting.tiny else WORKERS)
        lines = notes.read_text().splitlines() if notes.exists() else []
    row = figures([json.loads(line) for line in lines], status, device=setting.on.type)
    return row | {"files": len(files), "wall_s": round(time.monotonic() - began, 1)}


def gpu_files() -> list[Path]:
    """Files that have such tests: others may need packages that are not installed."""
    return sorted(path for path in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8"))


def figures(notes: list[dict[str, Any]], status: int | None, *, device: str) -> dict[str, Any]:
    """The row of a run.

    Args:
        notes: lines of `gpu_parts.outcome_notes`, in their order.
        status: pytest's exit status; None if it was killed, because it took too long.
        device: type of the device; with "cuda" some test has to pass.
    """
    ended = {note["test"]: note for note in notes if note["what"] == "ended"}
    outcomes = Counter(note["outcome"] for note in ended.values())
    failed = [note for note in ended.values() if note["outcome"] == "failed"]
    unfinished = [test for test in dict.fromkeys(note["test"] for note in notes) if test not in ended]
    slowest = sorted(ended.values(), key=lambda note: -note["seconds"])[:5]
    return {
        **{outcome: outcomes[outcome] for outcome in ("passed", "failed", "skipped")},
        "unfinished": unfinished[:_LISTED],
        "failures": [{"test": note["test"], "why": note["why"]} for note in failed[:_LISTED]],
        "slowest_s": {note["test"]: round(note["seconds"], 2) for note in slowest},
        **checked(
            f"{len(failed)} failed" if failed else None,
            f"{len(unfinished)} did not end" if unfinished else None,
            "out of time" if status is None else f"pytest ended with status {status}" if status not in (0, 1) else None,
            "none passed" if device == "cuda" and not outcomes["passed"] else None,
        ),
    }


def run_pytest(
    files: list[Path], notes: Path, *, workers: int, seconds: float = SECONDS, root: Path = ROOT
) -> int | None:
    """The exit status; None if it took longer than `seconds`. `root`: folder that names of tests start from."""
    shared = importlib.util.find_spec("xdist") is not None
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider"),
        # A file that cannot be imported here costs its own tests and no others.
        *("--continue-on-collection-errors", "-p", "gpu_parts.outcome_notes", f"--outcome-notes={notes}"),
        *("-c", str(ROOT / "pyproject.toml"), f"--rootdir={root}"),
        *(("-n", str(workers)) if shared and workers else ()),
        *map(str, files),
    ]
    # Options of pytest in the environment are for other runs.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, env=environment) as process:
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
