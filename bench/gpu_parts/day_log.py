"""The log of a GPU day: what its processes say on stderr. It gets its name when the device is known."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import IO


class DayLog:
    """A file without a buffer, which processes share.

    Attributes:
        stream: the file; one that nobody sees, where the folder takes none.
    """

    def __init__(self, folder: Path) -> None:
        self._path: Path | None = folder / f".gpu_day-{os.getpid()}.log"
        self._named = False
        self.stream: IO[bytes]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.stream = self._path.open("w+b", buffering=0)
        except OSError:
            self.stream, self._path = tempfile.TemporaryFile(buffering=0), None  # noqa: SIM115

    def __enter__(self) -> "DayLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        if self._path is not None and not self._named:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def name(self, path: Path) -> None:
        """It is `path` from now on."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.replace(path)
                self._named = True
