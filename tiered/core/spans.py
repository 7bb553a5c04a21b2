"""Named ranges in the code: recorded while a recorder is active in the thread, and next to nothing otherwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from tiered.core.ops import Op
from tiered.core.recorder import Recorder, Span

P = ParamSpec("P")
R = TypeVar("R")

_ACTIVE: ContextVar[Recorder | None] = ContextVar("active recorder", default=None)  # each thread has its own


class _Nothing:
    """A range that nobody records."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


def active() -> Recorder | None:
    """The recorder of this thread, if there is one."""
    return _ACTIVE.get()


def span(op: Op, layer: int | None = None, kind: str | None = None) -> Span | _Nothing:
    """`with span(Op.MLP, layer):` is a range of that name. Without `layer` it is of the layer that it is inside of.
    `kind`: what the forward is for."""
    recorder = _ACTIVE.get()
    return _NOTHING if recorder is None else recorder.span(op, layer, kind)


def spanned(op: Op) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Every call of the decorated function is a range."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(op):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Let `recorder` see what this thread does as long as the block lasts. A recording inside another takes its place
    meanwhile."""
    token = _ACTIVE.set(recorder)
    try:
        yield recorder
    finally:
        _ACTIVE.reset(token)
