"""Runs a part in a process of its own, and in another one behind each crash, until its cases or its time have ended."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import IO, Any

from gpu_parts.part import Part
from gpu_parts.part_process import WORKER, PartProcess
from gpu_parts.setting import Setting

Row = tuple[str, dict[str, Any]]  # of a case; "" where the part failed before it had any
NO_TIME, STOPPED = "no time left", "ended by a signal"
SHORTEST = 5.0  # seconds that have to be left for another process: it takes some to start
STARTING = 60.0  # seconds in which a process has to say what its cases are: torch may come from a cold disk


def run_part(
    part: Part,
    setting: Setting,
    *,
    limit: float,
    log: IO[bytes],
    stop: Callable[[], bool] = lambda: False,
    command: Sequence[str] = WORKER,
) -> Generator[Row]:
    """A row for every case of `part` as soon as there is one: what was measured, or why it was not.

    A row has `took_s`, the seconds of its case, where the case was begun. What has no time left is skipped, with it
    what was being measured when the time ended; a case that dies, or takes longer than it may, has failed.

    Args:
        limit: seconds for all of it.
        log: a file for reading and writing, without a buffer, that gets what the processes say on stderr.
        stop: once it is true nothing more is measured. The process is killed then, and when the caller has enough.
        command: the process.
    """
    end = time.monotonic() + limit
    waiting: list[str] | None = None  # cases without a row; None: nobody has said yet which there are
    while waiting is None or waiting:
        case, started, begun, since = None, False, False, time.monotonic()
        why_not = STOPPED if stop() else NO_TIME if since > end - SHORTEST else None
        if why_not:
            yield from ((each, {"skipped": why_not}) for each in waiting or [""])
            return
        try:
            process = PartProcess(part, setting, waiting, log, command)
        except OSError as error:
            yield from ((each, {"failed": f"cannot be started: {error}"}) for each in waiting or [""])
            return
        with process:
            for said in process.lines():
                now = time.monotonic()
                if said is None:
                    most = part.case_seconds if started else STARTING
                    why = STOPPED if stop() else NO_TIME if now > end else None
                    process.why = why or (f"no answer within {most:g} s" if now - since > most else "")
                    continue
                match said:
                    case {"cases": [*cases]} if not started and cases and all(isinstance(each, str) for each in cases):
                        waiting = list(dict.fromkeys(cases)) if waiting is None else waiting
                        started, since = True, now
                    case {"case": "", "row": dict(row)} if waiting is None:
                        yield "", row
                        return
                    case {"begin": str(name)} if waiting and name in waiting and case is None:
                        case, begun, since = name, True, now
                    case {"case": str(name), "row": dict(row)} if waiting and name == case:
                        waiting.remove(name)
                        yield name, row | {"took_s": round(now - since, 2)}
                        case, since = None, time.monotonic()
                        if not waiting:
                            return
                    case _:
                        process.note(f"out of place: {str(said)[:300]}")
        verdict = {"skipped" if process.why in (NO_TIME, STOPPED) else "failed": process.why}
        if waiting is None:
            yield "", verdict
            return
        if case is not None:
            waiting.remove(case)
            yield case, verdict | {"took_s": round(time.monotonic() - since, 2)}
        elif not begun:  # another process would do no better
            yield from ((each, verdict) for each in waiting)
            return
