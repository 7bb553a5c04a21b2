"""A process that answers requests: a request is a line of JSON on its stdin, the answer a line on its stdout."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Self


class PeerError(Exception):
    """A request has failed, or its process has ended."""


class Asked:
    """A process that answers one request at a time and idles in between; ends with the `with`.

    Attributes:
        about: the first line of its stdout, which comes when it is ready.
    """

    def __init__(self, command: Sequence[str], *, threads: int, environment: Mapping[str, str]) -> None:
        """Wait until it is ready. `threads`: threads of torch and of libraries with OpenMP. Raises `PeerError`."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # OpenMP reads its number when torch is loaded. The process inherits the mark of the measuring process, and ends
        # with it, or with its stdin.
        own = {**os.environ, "OMP_NUM_THREADS": str(threads), **environment}
        try:
            self._process = subprocess.Popen(command, env=own, **pipes)
        except OSError as error:
            raise PeerError(f"cannot be started: {error.strerror}") from error
        try:
            self.about = self._answer()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def request(self, **request: Any) -> dict[str, Any]:
        """The answer to `request`. Raises `PeerError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # how it ended is read below
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"ended with exit status {self._process.wait()}")
        answer = json.loads(line)
        if "failed" in answer:
            raise PeerError(answer["failed"])
        return answer
