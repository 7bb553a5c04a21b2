"""Books: named ranges of the code, which cost almost no time without an active recorder in the thread."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tiered.core.events import TierEvent
from tiered.core.ops import Op

P = ParamSpec("P")
R = TypeVar("R")


class TimedRange:
    """A range of the code, and the context manager that reports it.

    Attributes:
        op: operation of the range.
        layer: index of the layer, inherited from an enclosing range; None outside layers.
        forward: number of the step, from 0; None before the first.
        parent: the enclosing range; None for an outermost range.
    """

    __slots__ = ("_recorder", "forward", "layer", "op", "parent")

    def __init__(self, recorder: "Recorder", op: Op, layer: int | None) -> None:
        self._recorder, self.op, self.layer = recorder, op, layer
        self.forward: int | None = None
        self.parent: TimedRange | None = None

    def __enter__(self) -> "TimedRange":
        self._recorder.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.leave(self)


class Recorder:
    """Records the ranges of one thread, and the events of its tiers, while it is active (`recording`). Subclasses
    extend `enter` and `leave`. No tensors.

    Attributes:
        innermost: the innermost open range; None outside all ranges.
        kinds: kind of each step's forward; "" for a step without one.
        events: events of the tiers, in the order of their report. Times are ns of `time.monotonic_ns`.
    """

    def __init__(self) -> None:
        self.innermost: TimedRange | None = None
        self.kinds: list[str] = []
        self.events: list[TierEvent] = []

    def span(self, op: Op, layer: int | None = None, kind: str | None = None) -> TimedRange:
        if kind is not None and self.kinds:
            self.kinds[-1] = kind
        return TimedRange(self, op, layer)

    def enter(self, span: TimedRange) -> None:
        if span.op is Op.STEP:
            self.kinds.append("")
        span.parent = self.innermost
        span.forward = len(self.kinds) - 1 if self.kinds else None
        if span.layer is None and span.parent is not None:
            span.layer = span.parent.layer
        self.innermost = span

    def leave(self, span: TimedRange) -> None:
        self.innermost = span.parent


AnyRecorder = TypeVar("AnyRecorder", bound=Recorder)
_ACTIVE: ContextVar[Recorder | None] = ContextVar("active recorder", default=None)  # each thread has its own
_NOTHING = nullcontext()  # a range while no recorder is active


def active() -> Recorder | None:
    return _ACTIVE.get()


def span(op: Op, layer: int | None = None, kind: str | None = None) -> AbstractContextManager[Any]:
    """A named range, as in `with span(Op.MLP, layer):`. `layer`, `kind`: as in `Recorder.span`."""
    recorder = _ACTIVE.get()
    return _NOTHING if recorder is None else recorder.span(op, layer, kind)


def spanned(op: Op) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that makes every call of a function a range."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(op):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def recording(recorder: AnyRecorder) -> Iterator[AnyRecorder]:
    """Make `recorder` the active one of this thread during the block. An inner recorder replaces an outer one."""
    token = _ACTIVE.set(recorder)
    try:
        yield recorder
    finally:
        _ACTIVE.reset(token)
