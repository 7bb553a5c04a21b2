"""One process of a part: what it says on stdout, line by line, and how it ended. It ends with all that it started."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from gpu_parts.family import MARK, end_family
from gpu_parts.part import Part
from gpu_parts.setting import Setting

BENCH = Path(__file__).resolve().parents[1]
# -P: the folder that the day is started in is on no path; the repository's own has one called `kernels`.
WORKER = (sys.executable, "-P", "-m", "gpu_parts.worker")
_POLL = 0.05  # seconds between two looks at the clock
_LONGEST_LINE = 1 << 24  # bytes; longer is no row
_LONGEST_WHY = 300
_MOST_NOTES = 50
_LAST_PIECES = 64  # that are read of a process that has to end: more is noise
_ENDING = 2.0  # seconds in which what was killed has to be gone


class PartProcess:
    """A process that is told what to measure, and ends with the `with`.

    Attributes:
        why: how it ended, or why it had to; filled in behind the `with`.
    """

    def __init__(
        self, part: Part, setting: Setting, cases: list[str] | None, log: IO[bytes], command: Sequence[str] = WORKER
    ) -> None:
        """`cases`: those that it is to measure; None: all. `log` gets its stderr, and what it says that is nothing."""
        self._log, self._log_start, self._mark = log, os.fstat(log.fileno()).st_size, uuid.uuid4().hex
        paths = [str(BENCH), str(BENCH.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {
            MARK: self._mark,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # where it crashed is then in the log
            "HF_HUB_OFFLINE": "1",  # a machine without a network may let a request hang
        }
        if setting.tiny:
            # No time of a rehearsal counts, and on busy cores threads that spin while they wait take far longer.
            own["OMP_WAIT_POLICY"] = "passive"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # stays open: the process ends itself when it sees the end of it
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | own,
            process_group=0,  # Ctrl-C is for the day, which ends its processes itself
            bufsize=0,
        )
        request = {"part": part.name, "setting": setting.as_dict(), "cases": cases}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already; how it died is told when it is waited for
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self.why, self._notes = "", 0

    def __enter__(self) -> "PartProcess":
        return self

    def __exit__(self, *_: object) -> None:
        gone = end_family(self._mark, self._process.pid)
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=_ENDING)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        if not self.why:
            self.why = _ending(status) + self._last_words()
        if not gone or status is None:
            self.why += ", and cannot be killed"

    def lines(self) -> Iterator[dict[str, Any] | None]:
        """What it says, until it has ended; None several times a second, to look at the clock. Once `why` is set there,
        what it has said by then is the rest."""
        assert self._process.stdout is not None
        source, rest = self._process.stdout.fileno(), b""
        last = 0
        while last < _LAST_PIECES:
            last += bool(self.why)
            if select.select([source], [], [], 0 if self.why else _POLL)[0]:
                piece = os.read(source, 1 << 16)
                if not piece:  # what a dying process has said by half is no row
                    break
                *whole, rest = (rest + piece).split(b"\n")
                yield from (said for line in whole if (said := self._understood(line)) is not None)
                if len(rest) > _LONGEST_LINE:
                    self._understood(rest[:_LONGEST_WHY])
                    rest = b""
            elif self.why:
                return
            if not self.why:
                yield None
        while not self.why and self._process.poll() is None:  # libraries may take seconds to put themselves away
            yield None
            time.sleep(_POLL)

    def _understood(self, line: bytes) -> dict[str, Any] | None:
        """None, and a line of the log, for what is no JSON object."""
        try:
            said = json.loads(line, parse_constant=_no_number)
        except ValueError:
            said = None
        if isinstance(said, dict):
            return said
        self.note(f"not understood: {line[:_LONGEST_WHY]!r}")
        return None

    def note(self, text: str) -> None:
        """A line of the log, as long as there are few."""
        self._notes += 1
        with contextlib.suppress(OSError):  # full disk
            if self._notes <= _MOST_NOTES:
                self._log.write(f"--- {text}\n".encode())

    def _last_words(self) -> str:
        """The end of what it said on stderr."""
        log = self._log.fileno()
        end = os.fstat(log).st_size
        start = max(self._log_start, end - 4096)
        said = os.pread(log, end - start, start).decode(errors="replace").splitlines()
        words = [line.strip() for line in said if line.strip() and not line.startswith("---")]
        return f": {words[-1][:_LONGEST_WHY]}" if words else ""


def _ending(status: int | None) -> str:
    if status is None:
        return "did not end"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
