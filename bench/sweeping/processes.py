"""A process for every measurement: what it says, how it died, or that it took too long."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sweeping.point import Point

BENCH = Path(__file__).resolve().parents[1]
# -P: the folder that the sweep is started in is on no path; the repository's own has one called `kernels`.
WORKER = (sys.executable, "-P", "-m", "sweeping.worker")
_POLL = 0.01  # seconds
_LONGEST_WHY = 300
Job = tuple[Point, int]  # which run of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that ended: the rows that it printed, or why there are none."""

    job: Job
    rows: Any
    why: str | None
    seconds: float


@dataclass(slots=True)
class _Running:
    job: Job
    process: subprocess.Popen[str]
    out: IO[str]
    err: IO[str]
    began: float = field(default_factory=time.monotonic)


def run_all(
    jobs: Sequence[Job],
    request: Callable[[Job], dict[str, Any]],
    *,
    command: Sequence[str] = WORKER,
    at_a_time: int = 1,
    timeout: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[Ended]:
    """Measure `jobs` in their order, `at_a_time` of them at once, and give each as it ends.

    Args:
        request: what the process of a job gets, as JSON, on the first line of its stdin.
        command: the process.
        timeout: seconds after which a process is killed.
        stop: once it is true no more are given; those that run are killed, as they are when the caller has enough.
    """
    waiting, running = list(reversed(jobs)), list[_Running]()
    try:
        while (waiting or running) and not stop():
            while waiting and len(running) < at_a_time:
                job = waiting.pop()
                running.append(_started(job, request(job), command))
            for each in list(running):
                late = timeout is not None and time.monotonic() - each.began > timeout
                if each.process.poll() is None and not late:
                    continue
                running.remove(each)
                if late and each.process.poll() is None:
                    _kill(each)
                    yield _ended(each, None, f"no answer within {timeout:g} s")
                else:
                    yield _ended(each, *_answer(each))
            time.sleep(_POLL)
    finally:
        for each in running:
            _kill(each)


def _started(job: Job, request: dict[str, Any], command: Sequence[str]) -> _Running:
    paths = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Closed when it ended. What it prints may be anything.
    out, err = (tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2))  # noqa: SIM115
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # stays open: the process ends itself when it sees the end of it
        stdout=out,
        stderr=err,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        process_group=0,  # Ctrl-C is for the sweep, which ends its processes itself
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already; how it died is told when it is waited for
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    return _Running(job, process, out, err)


def _kill(running: _Running) -> None:
    """And whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()


def _ended(running: _Running, rows: Any, why: str | None) -> Ended:
    assert running.process.stdin is not None
    for stream in (running.process.stdin, running.out, running.err):
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    return Ended(job=running.job, rows=rows, why=why, seconds=time.monotonic() - running.began)


def _answer(running: _Running) -> tuple[Any, str | None]:
    """The rows, or why there are none."""
    status = running.process.returncode
    if status < 0:
        return None, f"killed by {signal.Signals(-status).name}"
    if status:
        last = _last_line(running.err)
        return None, f"exit status {status}" + (f": {last[:_LONGEST_WHY]}" if last else "")
    last = _last_line(running.out)
    try:
        return json.loads(last)["rows"], None
    except (ValueError, KeyError, TypeError):
        return None, f"no rows on the last line of its output: {last[:_LONGEST_WHY]!r}"


def _last_line(stream: IO[str]) -> str:
    stream.seek(0)
    lines = [line.strip() for line in stream.read().splitlines() if line.strip()]
    return lines[-1] if lines else ""
