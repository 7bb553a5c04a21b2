"""Modes of calls: torch's gradient mode, Ctrl-C at safe points, and turns of threads."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_LOOK_SECONDS = 0.1  # between two checks for Ctrl-C
P = ParamSpec("P")
R = TypeVar("R")


def call_modes(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without gradients and with Ctrl-C at safe points. It runs outside `torch.inference_mode`, because a
    later call could not write tensors made inside."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad(), _INTERRUPTS.deferred():
            return function(*args, **kwargs)

    return call


def safe_point() -> None:
    """Raise a Ctrl-C that came during a call. Callers must have consistent books, fences and buffers."""
    _INTERRUPTS.deliver()


class _Interrupts:
    """Defers Ctrl-C in the main thread, the only one that runs signal handlers. It is raised at the next safe point or
    at the end of the call, because elsewhere it could leave the books wrong. A second Ctrl-C is raised at once."""

    def __init__(self) -> None:
        self._handler: Callable[[int, Any], object] | None = None  # the caller's, while a call defers
        self._came = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        handler = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        if not main or self._handler is not None or not callable(handler):
            yield
            return
        self._handler, self._came = handler, False
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            self._handler = None
            if self._came:
                handler(signal.SIGINT, None)

    def deliver(self) -> None:
        if self._came and self._handler is not None and threading.current_thread() is threading.main_thread():
            self._came = False
            self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: Any) -> None:
        if self._came:
            self.deliver()
        self._came = True


_INTERRUPTS = _Interrupts()


class Turn:
    """A lock that one thread may hold several times; other threads wait until all holds have ended. A hold may end in
    another thread and in any order. Ctrl-C ends the wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread, self._holds = 0, 0

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._changed:
            while self._holds and self._thread != threading.get_ident():
                self._changed.wait(_LOOK_SECONDS)
                safe_point()
            self._thread = threading.get_ident()
            self._holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()
