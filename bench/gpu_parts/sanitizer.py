"""NVIDIA's compute-sanitizer over every kernel and over the transports, and the same program without it.

The tool watches a program of its own: gpu_parts/sanitized.py. The host makes runs under the tool slow, not the device,
so some of them go side by side.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from tempfile import TemporaryFile
from typing import Any

from measuring.process import BENCH

from gpu_parts.setting import Setting, checked, skipped

TOOL = "compute-sanitizer"
PROGRAM = (sys.executable, "-P", "-m", "gpu_parts.sanitized")
DONE = "sanitized: "  # beginning of the program's last line; JSON follows
LIMIT, BARE_LIMIT = 80.0, 30.0  # seconds of one run, under the tool and bare
AT_ONCE = 3  # runs; more would slow each other down on the cores of the host
LATE = re.compile(r"^Timeout \(\d", re.MULTILINE)  # the program has ended itself
_SCHEDULES, _BARE_SCHEDULES = 2, 100
_LOGGED = 20_000  # characters of a run that go to the log
_GRACE = 3.0  # seconds for a program that ends itself to be gone
_BARE: dict[str, tuple[str | None, str]] = {f"bare {what}": (None, what) for what in ("kernels", "transports")}
_WATCHED: dict[str, tuple[str | None, str]] = {
    f"{tool} {what}": (tool, what)
    for tool, whats in {
        "racecheck": ("kernels", "transports"),
        "memcheck": ("kernels", "transports", "planted"),
        "initcheck": ("kernels",),
    }.items()
    for what in whats
}
_OPTIONS = (
    # The tool's exit status if it found errors and the program itself ended well. torch causes API errors by its
    # questions (is this symbol there?), and checks them itself.
    *("--error-exitcode", "99", "--report-api-errors", "no"),
    *("--target-processes", "application-only", "--print-limit", "20"),
)
# Our kernels by Triton's names; torch's own are C++, whose mangled names begin with `_Z`.
_OUR_KERNELS = ("--kernel-regex", "kns=^(_[a-z]|attend_|merge_).*")
_PREFIX = "========="
_REFUSALS = re.compile(
    r"not supported|unable to|failed to (?:initiali[sz]e|load|connect|inject|attach)|internal sanitizer error"
    r"|unrecogni[sz]ed option|invalid option",
    re.IGNORECASE,
)
_SUMMARY = re.compile(
    r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: \d+ hazards? displayed \()(?P<errors>\d+) errors?"
    r"(?:, (?P<warnings>\d+) warnings?)?"
)
_BLOCKS, _BLOCK_LINES = 4, 6  # findings that a row keeps, and lines of each
_TAIL = 8  # last lines of the program's own


def cases(setting: Setting) -> list[str]:
    """The program without the tool comes first: if it fails, its runs under the tool mean nothing."""
    return [*_BARE, *_WATCHED]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """The program's work and the tool's findings; see `row_of`."""
    if case in _WATCHED and setting.on.type != "cuda":
        return skipped("needs a CUDA device")
    if case in _WATCHED and shutil.which(TOOL) is None:
        return skipped(f"{TOOL} is not on the PATH")
    return _begun(setting, watched=case in _WATCHED)[case].result()


@cache
def _begun(setting: Setting, *, watched: bool) -> dict[str, Future[dict[str, Any]]]:
    """All runs under the tool, or all bare ones, `AT_ONCE` side by side."""
    runs = _WATCHED if watched else _BARE
    pool, limit = ThreadPoolExecutor(AT_ONCE), LIMIT if watched or setting.tiny else BARE_LIMIT
    return {case: pool.submit(run, setting, tool, what, limit=limit) for case, (tool, what) in runs.items()}


def run(setting: Setting, tool: str | None, what: str, *, limit: float) -> dict[str, Any]:
    """The program in a process of its own, under one tool of the sanitizer. None runs it without a tool, and with as
    many random schedules as it gets to. It is stopped after `limit` seconds if it does not end itself then. It stays in
    this process's group, and ends with it."""
    command = [*PROGRAM, what, "--device", setting.device, "--seed", str(setting.seed), "--limit", str(limit)]
    paths = [str(BENCH), str(BENCH.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    schedules, seconds = (1 if setting.tiny else _BARE_SCHEDULES), limit / 2
    if tool is not None:
        # Not with initcheck: memory that torch's kernels write would be uninitialized to it.
        ours = _OUR_KERNELS if tool == "racecheck" or what == "planted" else ()
        command, schedules, seconds = [TOOL, "--tool", tool, *_OPTIONS, *ours, *command], _SCHEDULES, 0
        # Without torch's cache every tensor is an allocation of its own: an access behind its end is an error.
        environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    if setting.on.type != "cuda":
        environment["TRITON_INTERPRET"] = "1"
    command += ["--schedules", str(schedules), "--seconds", str(seconds)]
    begin, status = time.monotonic(), None
    with TemporaryFile() as said:  # a pipe would stay open in processes that are left behind
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment
        )
        try:
            status = process.wait(limit + _GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace").replace(f"{BENCH.parent}/", "")
    print(text[-_LOGGED:], file=sys.stderr, flush=True)
    row: dict[str, Any] = {"run_s": round(time.monotonic() - begin, 1)} | row_of(tool, text, status, limit)
    if what != "planted" or row.get("status") == "skipped":
        return row
    if any("_decode" in line for finding in row["found"] for line in finding):
        return {name: row[name] for name in ("run_s", "errors", "found")} | checked()
    return row | checked("the tool does not find a planted error: nothing else that it says counts")


def row_of(tool: str | None, text: str, status: int | None, limit: float) -> dict[str, Any]:
    """The row of a run with the output `text`, the tool's lines among the program's. `status`: exit status; None if the
    run was killed after `limit` seconds. The row is `ok` if the program ended well with every answer right, and `tool`
    (None for no tool) found no errors. A tool that refuses, or gives no verdict, is skipped.

    Raises:
        RuntimeError: the program failed by itself, or the tool printed no verdict.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    tools = [line.removeprefix(_PREFIX).removeprefix(" ") for line in lines if line.startswith(_PREFIX)]
    own = [line for line in lines if not line.startswith(_PREFIX)]
    done = next((line for line in reversed(own) if line.startswith(DONE)), None)
    ran = None if done is None else json.loads(done.removeprefix(DONE))
    late, summed_up, row = status is None or LATE.search(text), tool is None, {}
    tail = {"tail": own[-_TAIL:]}
    if tool is not None:
        errors, warnings, found, summed_up = _verdict(tools)
        row = {"errors": errors, "warnings": warnings, "found": found}
        if errors:
            return row | checked(f"{tool}: {errors} errors") | ({} if ran else tail)
        refusal = next((line for line in tools if _REFUSALS.search(line)), None)
        if refusal is not None and (ran is None or not summed_up):
            return skipped(f"{tool}: {refusal}") | tail
        if late:
            return skipped(f"{tool}: no verdict in {limit:.0f} s") | tail
    if ran is None or late:
        ended = f"did not end in {limit:.0f} s" if late else f"the program ended with status {status}"
        raise RuntimeError(f"{ended}: {_told(own)}")
    row |= {name: value for name, value in ran.items() if name != "wrong"}
    if ran["wrong"]:
        return row | checked(*ran["wrong"][:_BLOCKS])
    if status != 0:
        raise RuntimeError(f"exit status {status} though the program ended well: {_told(tools or own)}")
    if not summed_up:
        raise RuntimeError(f"{tool} gave no summary: {_told(tools)}")
    return row | checked()


def _verdict(lines: Sequence[str]) -> tuple[int, int, list[list[str]], bool]:
    """Errors and warnings that the tool counted, the first findings, and whether the tool has summed up. If it has not,
    errors are its findings so far. A finding is a line with indented ones below it."""
    blocks: list[list[str]] = []
    for line in lines:
        if not line.startswith(" "):
            blocks.append([line])
        elif blocks and "Host Frame" not in line and "host backtrace" not in line:
            blocks[-1].append(line.strip())
    findings = [block[:_BLOCK_LINES] for block in blocks if len(block) > 1]
    sums = [(int(match["errors"]), int(match["warnings"] or 0)) for line in lines if (match := _SUMMARY.search(line))]
    # The largest sum: another one may count errors that were not printed.
    errors, warnings = max(sums, default=(len(findings), 0))
    return errors, warnings, findings[:_BLOCKS], bool(sums)


def _told(lines: Sequence[str]) -> str:
    return " | ".join(lines[-_TAIL:]) or "it said nothing"
