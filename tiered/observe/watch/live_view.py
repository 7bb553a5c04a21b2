"""The view on a terminal."""

import io
import sys
import time
from collections import deque
from contextlib import redirect_stderr, suppress
from threading import Condition, Thread

from rich.console import Console, Group
from rich.live import Live

from tiered.observe.watch.bars import HISTORY
from tiered.observe.watch.frame import Frame
from tiered.observe.watch.picture import Painter

FRAMES_PER_SECOND = 12  # at most
# A terminal that knows these shows a frame when it is complete; all others ignore them.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"


class LiveView:
    """The latest frame on a screen of its own, drawn by a thread, so that a slow terminal slows no forward. Opens with
    the first frame; what others write to stderr meanwhile comes when the screen is left.

    Whatever fails here ends the view with one note, and nothing else.
    """

    def __init__(self, painter: Painter, *, slow: float = 0.0) -> None:
        """`slow`: seconds that every frame stays at least."""
        self._painter, self._slow = painter, slow
        self._stream = sys.stderr
        self._console = Console(file=self._stream, highlight=False)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._held = io.StringIO()
        self._redirection = redirect_stderr(self._held)
        self._past: deque[Frame] = deque(maxlen=HISTORY)
        self._changed = Condition()
        self._fresh = self._over = self._open = False
        self._thread = Thread(target=self._draw_all, name="tiered watch", daemon=True)

    def show(self, frame: Frame) -> None:
        """Let `frame` be what is drawn next; returns at once unless the view is slow."""
        with self._changed:
            if self._over:
                return
            self._past.append(frame)
            self._fresh = True
            if not self._open:
                self._open = True
                self._redirection.__enter__()
                self._live.start()
                self._thread.start()
            self._changed.notify()
        time.sleep(self._slow)

    def give_up(self, error: Exception) -> None:
        """End the view with a note; from any thread. Further frames are ignored."""
        if self._leave():
            self._stream.write(f"tiered: the view has ended: {type(error).__name__}: {error}\n")
            self._stream.flush()

    def close(self, *, finished: bool) -> None:
        """Leave the screen, and where the call has finished leave the last frame behind."""
        if self._leave() and finished and self._past:
            try:
                # Another console: the width may have changed, and a height no longer matters.
                self._console.print(
                    *self._painter.picture(tuple(self._past), self._console.width), sep="\n", soft_wrap=True
                )
            except Exception as error:
                self._stream.write(f"tiered: the last frame cannot be drawn: {type(error).__name__}: {error}\n")

    def _leave(self) -> bool:
        """Give the terminal back; False where that has been done."""
        with self._changed:
            if self._over:
                return False
            self._over = True
            self._changed.notify()
        if self._open:
            with suppress(RuntimeError):  # the thread itself ends the view
                self._thread.join()
            self._redirection.__exit__(None, None, None)
            self._live.stop()
            self._stream.write(self._held.getvalue())
            self._stream.flush()
        return True

    def _draw_all(self) -> None:
        """Draw what is fresh until the view is over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fresh or self._over)
                if self._over:
                    return
                past, self._fresh = tuple(self._past), False
            try:
                lines = self._painter.picture(past, *self._console.size)
                self._stream.write(_BEGIN)
                self._live.update(Group(*lines), refresh=True)
                self._stream.write(_END)
                self._stream.flush()
            except Exception as error:
                with suppress(Exception):  # there may be nowhere to say it
                    self.give_up(error)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._over, timeout=1 / FRAMES_PER_SECOND)
