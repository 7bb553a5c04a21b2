"""One process: what it says on stdout, line by line, and how it ended. It ends with all that it started."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from measuring.family import MARK, end_family

BENCH = Path(__file__).resolve().parents[1]
# -P: the folder that this is started in is on no path; the repository's own has one called `kernels`.
WORKER = (sys.executable, "-P", "-m", "measuring.worker")
_POLL = 0.02  # seconds between two looks at the clock
_LONGEST_LINE = 1 << 24  # bytes; longer is no row
_LONGEST_WHY = 300
_LAST_PIECES = 64  # that are read of a process that has to end: more is noise
_ENDING = 2.0  # seconds in which what was killed has to be gone
# Where it crashed is then in the log, and a machine without a network lets no request hang.
_OWN = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}


class Process:
    """A process that is told what to measure, and ends with the `with`.

    Attributes:
        why: how it ended, or why it had to; filled in behind the `with`.
    """

    def __init__(self, request: Mapping[str, Any], log: IO[bytes], command: Sequence[str] = WORKER) -> None:
        """`log` gets its stderr, and what it says that is no row. Raises `OSError` where it cannot be started."""
        self._log, self._log_start, self._mark = log, os.fstat(log.fileno()).st_size, uuid.uuid4().hex
        paths = [str(BENCH), str(BENCH.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # stays open: the process ends itself when it sees the end of it
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | _OWN | {MARK: self._mark, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # Ctrl-C is for whoever measures, who ends its processes itself
            bufsize=0,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already; how it died is told when it is waited for
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self.why = ""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        gone, status = end_family(self._mark, self._process.pid), None
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
        source, rest, last = self._process.stdout.fileno(), b"", 0
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

    def note(self, text: str) -> None:
        """A line of the log."""
        with contextlib.suppress(OSError):  # full disk
            self._log.write(f"--- {text}\n".encode())

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

    def _last_words(self) -> str:
        """The end of what it said on stderr."""
        log = self._log.fileno()
        end = os.fstat(log).st_size
        start = max(self._log_start, end - 4096)
        said = os.pread(log, end - start, start).decode(errors="replace").splitlines()
        kept = [line.strip() for line in said if line.strip() and not line.startswith("---")]
        return f": {kept[-1][:_LONGEST_WHY]}" if kept else ""


def _ending(status: int | None) -> str:
    if status is None:
        return "did not end"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
