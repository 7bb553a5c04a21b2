"""Part of a GPU day: NVIDIA's compute-sanitizer over every kernel and over the transports, and the same without it.

The tool is a program of its own, so what it watches is one too: gpu_parts/sanitized.py. The runs under the tool are
slow for reasons of the host, not of the device, so some of them go side by side.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from gpu_parts.sanitizer_report import ERROR_STATUS, Ended, row_of
from gpu_parts.setting import Setting

BENCH = Path(__file__).resolve().parents[1]
TOOL = "compute-sanitizer"
PROGRAM = (sys.executable, "-P", "-m", "gpu_parts.sanitized")
LIMIT, BARE_LIMIT = 80.0, 30.0  # seconds of one run, under the tool and bare
AT_ONCE = 3  # runs; more would slow each other down on the cores of the host
SCHEDULES, BARE_SCHEDULES = 2, 100
_LOGGED = 20_000  # characters of a run that go to the log
_GRACE = 3.0  # seconds for what ends itself to be gone
_WHATS = ("kernels", "transports")
_BARE: dict[str, tuple[str | None, str]] = {f"bare {what}": (None, what) for what in _WHATS}
_TOOLS = {"memcheck": (*_WHATS, "planted"), "racecheck": _WHATS, "initcheck": _WHATS[:1]}
_WATCHED: dict[str, tuple[str | None, str]] = {
    f"{tool} {what}": (tool, what) for tool, whats in _TOOLS.items() for what in whats
}
# Ours by what Triton calls them; torch's own are C++, of which a mangled name begins with `_Z`.
_OUR_KERNELS = ("--kernel-regex", "kns=^_[a-z].*")


def cases(setting: Setting) -> list[str]:
    """The program without the tool first: what fails there says nothing under the tool."""
    return [*_BARE, *_WATCHED]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """What the program ran and what the tool found; see `row_of`."""
    if case in _WATCHED and setting.on.type != "cuda":
        return {"skipped": "needs a CUDA device"}
    if case in _WATCHED and shutil.which(TOOL) is None:
        return {"skipped": f"{TOOL} is not on the PATH"}
    return _begun(setting, watched=case in _WATCHED)[case].result()


def run(setting: Setting, tool: str | None, what: str, *, limit: float) -> dict[str, Any]:
    """The program in a process of its own, under one tool of the sanitizer or, with None, under none: then with as
    many random schedules as it gets to."""
    if tool is None:
        schedules = 1 if setting.tiny else BARE_SCHEDULES
        return row_of(None, _ended((), setting, what, schedules=schedules, seconds=limit / 2, limit=limit))
    # API errors are what torch asks about (is this symbol there?) and checks itself.
    command = (
        *(TOOL, "--tool", tool, "--error-exitcode", str(ERROR_STATUS), "--report-api-errors", "no"),
        *("--target-processes", "application-only", "--print-limit", "20"),
        # Not with initcheck: what torch's kernels write would be uninitialized to it.
        *(_OUR_KERNELS if tool == "racecheck" or what == "planted" else ()),
    )
    row = row_of(tool, _ended(command, setting, what, schedules=SCHEDULES, seconds=0, limit=limit))
    return _planted(row) if what == "planted" else row


def _planted(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a run in which an error has to be found, in the kernel that makes it."""
    if "skipped" in row:
        return row
    if any("_copy_segments" in line for finding in row["found"] for line in finding):
        return {"ok": True, **{name: row[name] for name in ("run_s", "errors", "found")}}
    return row | {"ok": False, "why": "the tool does not find a planted error: nothing else that it says counts"}


@cache
def _begun(setting: Setting, *, watched: bool) -> dict[str, Future[dict[str, Any]]]:
    """All runs under the tool, or all bare ones, `AT_ONCE` side by side."""
    runs = _WATCHED if watched else _BARE
    pool, limit = ThreadPoolExecutor(AT_ONCE), LIMIT if watched or setting.tiny else BARE_LIMIT
    return {case: pool.submit(run, setting, tool, what, limit=limit) for case, (tool, what) in runs.items()}


def _ended(
    before: Sequence[str], setting: Setting, what: str, *, schedules: int, seconds: float, limit: float
) -> Ended:
    """The program with `before` in front of its command line, stopped after `limit` seconds if it does not end itself
    then. It stays in this process's group, whose end is its own."""
    command = [
        *before,
        *PROGRAM,
        *(what, "--device", setting.device, "--seed", str(setting.seed), "--limit", str(limit)),
        *("--schedules", str(schedules), "--seconds", str(seconds)),
    ]
    paths = [str(BENCH), str(BENCH.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if before:
        # Without torch's cache every tensor is an allocation of its own: a step over its end is one into nothing.
        environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    if setting.on.type != "cuda":
        environment["TRITON_INTERPRET"] = "1"
    begin = time.monotonic()
    with TemporaryFile() as said:  # a pipe would stay open in whatever is left behind
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment
        )
        try:
            status: int | None = process.wait(limit + _GRACE)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace").replace(f"{BENCH.parent}/", "")
    print(text[-_LOGGED:], file=sys.stderr, flush=True)
    return Ended(text=text, status=status, seconds=time.monotonic() - begin, limit=limit)
