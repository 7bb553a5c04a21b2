"""Ends a process with all that it started, children of children too, in whatever group or session they are."""

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "TIERED_MEASURE"  # the environment variable that all of a family inherit
PATIENCE = 5.0  # seconds: giving back memory takes some; what waits inside a driver may never end, and nobody can help
_POLL = 0.01


def end_family(mark: str, group: int) -> bool:
    """SIGKILL to the process group `group` and to every process whose `MARK` is `mark`, but the caller; then wait until
    none of them runs, for what they held of the device is free only then. False where one still does after `PATIENCE`.
    Without a /proc the group is all that is found."""
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
    """Ids of the processes that were started with `mark`, but the caller. One that is ending shows no environment."""
    wanted, own = f"{MARK}={mark}".encode(), str(os.getpid())
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended by now, or is somebody else's
            if folder.name != own and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _runs(process: int) -> bool:
    """Not so once it has ended, even if nobody has asked how."""
    try:
        return Path("/proc", str(process), "stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
