"""A lock that the calls of one thread share."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident


class Turn:
    """One thread has it at a time, any number of times over; another thread waits until all of these have ended.

    A hold may end in another thread than it began in, and in any order: a call that is half done may be dropped
    anywhere. Ctrl-C ends the wait.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._thread, self._holds = 0, 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have it while the `with` lasts."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holds or self._thread == get_ident())
            self._thread = get_ident()
            self._holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()
