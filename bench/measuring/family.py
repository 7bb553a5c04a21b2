"""Ends a process with all that it started, children of children too, in whatever group or session they are."""

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "TIERED_MEASURE"  # the environment variable that a family inherits
PATIENCE = 5.0  # seconds: giving back memory takes time, and a process that waits inside a driver may never end
_POLL = 0.01


def end_family(mark: str, group: int) -> bool:
    """Kill the process group `group` and every process whose `MARK` is `mark`, except the caller. Wait until none of
    them runs, because their device memory is free only then. False if one still runs after `PATIENCE`. Without a /proc,
    only the group is killed."""
    until, killed, members = time.monotonic() + PATIENCE, set[int](), family(mark)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    while members or any(map(_runs, killed)):
        for process in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed.update(members)
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
        members = family(mark)
    return True


def family(mark: str) -> list[int]:
    """Ids of processes that were started with `mark`, except the caller. An ending process shows no environment."""
    wanted, own = f"{MARK}={mark}".encode(), str(os.getpid())
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if folder.name != own and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _runs(process: int) -> bool:
    """False for a process that has ended, even if its parent has not waited for it."""
    try:
        return Path("/proc", str(process), "stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
