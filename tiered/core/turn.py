"""A lock that the calls of one thread share."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident

from tiered.core.modes import safe_point

_SECONDS = 0.1  # between two looks for Ctrl-C


class Turn:
    """One thread holds the lock at a time, any number of times over; another thread waits until all holds have ended.

    A hold may end in another thread than it began in, and in any order: a call that is half done may be dropped
    anywhere. Ctrl-C ends the wait.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._thread, self._holds = 0, 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock while the `with` lasts."""
        with self._changed:
            while self._holds and self._thread != get_ident():
                self._changed.wait(_SECONDS)
                safe_point()
            self._thread = get_ident()
            self._holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()
