"""Ctrl-C and SIGTERM as a wish to stop, which is read between two steps, so that no file is left half written."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopWish:
    """True once a signal came. `signal`: its number; None before."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_wish() -> Iterator[StopWish]:
    """The first signal is a wish; a second one has its usual effect."""
    wish = StopWish()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        wish.signal = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield wish
    finally:
        restore()
