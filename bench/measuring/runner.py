"""Measures a group of jobs in one process, and in another one after each crash."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from measuring.point import Job
from measuring.process import WORKER, Process

NO_TIME, STOPPED = "no time left", "ended by a signal"
SHORTEST = 5.0  # least seconds for another process, which takes some to start
STARTING = 60.0  # seconds in which a process has to begin: torch may come from a cold disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A job that ended.

    Attributes:
        rows: rows of the measurement, with "status" and "why". A status is "ok", "refused" (by the library), "failed"
            (the process died, took too long, or raised) or "skipped" (no time was left).
        seconds: seconds that the job took.
    """

    job: Job
    rows: Sequence[dict[str, Any]]
    seconds: float


def run_group(
    jobs: Sequence[Job],
    *,
    log: IO[bytes],
    local: Mapping[str, Any] | None = None,
    timeout: float = float("inf"),
    limit: float = float("inf"),
    stop: Callable[[], bool] = lambda: False,
    command: Sequence[str] = WORKER,
) -> Generator[Ended]:
    """`jobs` of one study in one process, each as soon as it has ended. If a job takes the process down, another
    process measures the jobs behind it.

    Args:
        log: unbuffered file for reading and writing; it gets stderr of the processes.
        local: keywords of `measure` that do not change its rows, such as a path; None for none.
        timeout, limit: seconds for each job, once its process has begun with it, and for all of them.
        stop: once it is true, nothing more is given. The process is killed then, or when the generator is closed.
        command: command line of the process.
    """
    end, waiting = time.monotonic() + limit, list(jobs)
    while waiting and not stop():
        since, current, begun = time.monotonic(), None, False
        heard = since  # when the process last began or ended a job
        if limit < float("inf") and since > end - SHORTEST:
            yield from (_without(job, "skipped", NO_TIME) for job in waiting)
            return
        asked = list(waiting)
        request = {"study": jobs[0].point.study, "jobs": [job.point.settings for job in asked], "local": local or {}}
        try:
            process = Process(request, log, command)
        except OSError as error:
            yield from (_without(job, "failed", f"cannot be started: {error}") for job in waiting)
            return
        with process:
            for said in process.lines():
                now = time.monotonic()
                match said:
                    case None:
                        why = STOPPED if stop() else NO_TIME if now > end else None
                        most = timeout if begun else max(timeout, STARTING)
                        process.why = why or (f"no answer within {most:g} s" if now - heard > most else "")
                    case {"begin": int(number)} if current is None and number < len(asked) and asked[number] in waiting:
                        current, begun, heard = asked[number], True, now
                    case {"ended": int(number), **result} if current is not None and asked[number] is current:
                        waiting.remove(current)
                        yield Ended(job=current, rows=_rows(result), seconds=now - since)
                        current, since = None, time.monotonic()
                        heard = since
                    case _:
                        process.note(f"out of place: {str(said)[:300]}")
                if not waiting:
                    break
        # Ctrl-C also ends a process that has not left this one's group yet: that is no failure.
        if not waiting or stop():
            return
        status = "skipped" if process.why == NO_TIME else "failed"
        if current is not None:
            waiting.remove(current)
            yield _without(current, status, process.why, time.monotonic() - since)
        elif not begun:  # another process would do no better
            yield from (_without(job, status, process.why) for job in waiting)
            return


def _rows(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "failed" in said:
        return [{"status": "failed", "why": str(said["failed"]), "traceback": said.get("traceback")}]
    rows = said.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return [{"status": "failed", "why": f"no rows: {str(rows)[:80]}"}]
    return [{"status": "ok", "why": None} | row for row in rows]


def _without(job: Job, status: str, why: str, seconds: float = 0.0) -> Ended:
    return Ended(job=job, rows=[{"status": status, "why": why}], seconds=seconds)
