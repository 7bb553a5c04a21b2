"""One process: its lines on stdout, and how it ended. It ends with all that it started."""

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
# -P keeps the current folder off the path: the repository's root has a folder called `kernels`.
WORKER = (sys.executable, "-P", "-m", "measuring.worker")
_POLL = 0.02  # seconds between two looks at the clock
_LONGEST_LINE = 1 << 24  # bytes; longer is no row
_LONGEST_WHY = 300
_LAST_PIECES = 64  # pieces that are read of a process that has to end: more is noise
_ENDING = 2.0  # seconds for a killed process to be gone
# The log then has the place of a crash, and no request waits for a missing network.
_OWN = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}


class Process:
    """A process that measures `request`, and ends with the `with`.

    Attributes:
        why: why it has to end, from the caller, else how it ended, filled in at the end of the `with`.
    """

    def __init__(self, request: Mapping[str, Any], log: IO[bytes], command: Sequence[str] = WORKER) -> None:
        """`log` gets its stderr, and lines of stdout that are no JSON. Raises `OSError` if it cannot be started."""
        self._log, self._log_start, self._mark = log, os.fstat(log.fileno()).st_size, uuid.uuid4().hex
        paths = [str(BENCH), str(BENCH.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # stays open: the process ends itself at the end of stdin
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | _OWN | {MARK: self._mark, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # Ctrl-C reaches this process alone, which ends the new one itself
            bufsize=0,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and `why` will say how
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
        """JSON objects from its stdout, until it has ended, and None several times a second, to look at the clock. If
        the caller sets `why` then, only output so far follows."""
        assert self._process.stdout is not None
        source, rest, last = self._process.stdout.fileno(), b"", 0
        while last < _LAST_PIECES:
            last += bool(self.why)
            if select.select([source], [], [], 0 if self.why else _POLL)[0]:
                piece = os.read(source, 1 << 16)
                if not piece:  # half a line of a dying process is no row
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
        while not self.why and self._process.poll() is None:  # libraries may take seconds to shut down
            yield None
            time.sleep(_POLL)

    def note(self, text: str) -> None:
        """Write a line into the log."""
        with contextlib.suppress(OSError):  # full disk
            self._log.write(f"--- {text}\n".encode())

    def _understood(self, line: bytes) -> dict[str, Any] | None:
        """The JSON object of `line`; None, with a note in the log, if it is none."""
        try:
            said = json.loads(line, parse_constant=_no_number)
        except ValueError:
            said = None
        if isinstance(said, dict):
            return said
        self.note(f"not understood: {line[:_LONGEST_WHY]!r}")
        return None

    def _last_words(self) -> str:
        """Its last line on stderr."""
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
