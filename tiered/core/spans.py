"""Books: named ranges in the code, recorded while a recorder is active in the thread, and next to nothing otherwise."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from tiered.core.events import CopyEnded, Event, Waited
from tiered.core.ops import Op

P = ParamSpec("P")
R = TypeVar("R")


class Span:
    """A range of compute, and the context manager that measures it.

    Attributes:
        op, layer: what it is of; a range inside a layer's is of that layer.
        forward: number of the step that it is in, from 0 on; None before the first.
        parent: the range that it is in.
        began, ended: ns; `ended` is None while it lasts.
        inside_ns: of the ranges directly inside it.
    """

    __slots__ = ("_mark", "_recorder", "began", "ended", "forward", "inside_ns", "layer", "op", "parent")

    def __init__(self, recorder: "Recorder", op: Op, layer: int | None) -> None:
        self._recorder, self.op, self.layer = recorder, op, layer
        self.ended: int | None = None
        self.inside_ns = 0

    @property
    def name(self) -> str:
        """As it is shown: "mlp/L3"."""
        return self.op.value if self.layer is None else f"{self.op.value}/L{self.layer}"

    @property
    def own_ns(self) -> int:
        """Without the ranges inside it; 0 while it lasts."""
        return 0 if self.ended is None else self.ended - self.began - self.inside_ns

    def __enter__(self) -> "Span":
        self._recorder.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.leave(self)


class Recorder:
    """What happens in one thread while it is active (`recording`). No tensors.

    All times are ns of `time.monotonic_ns`, the clock that transports put their copies on.

    Attributes:
        spans: ranges, in the order in which they began.
        copies, waits: as the tiers report them, in the order in which they were counted.
        kinds: what the forward of each step was for; "" where it had none.
    """

    def __init__(
        self,
        *,
        synchronize: Callable[[], object] | None = None,
        mark: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        """
        Args:
            synchronize: called at both ends of every range, so that it has all of its own work and nothing else's:
                blocks the host until the device is done. None: what the host does counts.
            mark: makes a range of the same name for a profiler.
        """
        self.spans: list[Span] = []
        self.copies: list[CopyEnded] = []
        self.waits: list[Waited] = []
        self.kinds: list[str] = []
        self._synchronize, self._mark = synchronize, mark
        self._innermost: Span | None = None

    def span(self, op: Op, layer: int | None = None, kind: str | None = None) -> Span:
        """A range that begins when it is entered. `kind`: see `kinds`."""
        if kind is not None and self.kinds:
            self.kinds[-1] = kind
        return Span(self, op, layer)

    def add(self, event: Event) -> None:
        """Keep what is to be shown of what the tiers report."""
        if isinstance(event, CopyEnded):
            self.copies.append(event)
        elif isinstance(event, Waited):
            self.waits.append(event)

    def enter(self, span: Span) -> None:
        """`span` begins."""
        # What keeping books costs is in the range: nothing is left between ranges but the code there.
        if self._synchronize is not None:
            self._synchronize()
        span.began = time.monotonic_ns()
        if span.op is Op.STEP:
            self.kinds.append("")
        parent = span.parent = self._innermost
        span.forward = len(self.kinds) - 1 if self.kinds else None
        if span.layer is None and parent is not None:
            span.layer = parent.layer
        self._innermost = span
        self.spans.append(span)
        span._mark = None if self._mark is None else self._mark(span.name)
        if span._mark is not None:
            span._mark.__enter__()

    def leave(self, span: Span) -> None:
        """`span` ends."""
        self._innermost = span.parent
        try:
            if self._synchronize is not None:
                self._synchronize()
        finally:
            if span._mark is not None:
                span._mark.__exit__(None, None, None)
            span.ended = time.monotonic_ns()
            if span.parent is not None:
                span.parent.inside_ns += span.ended - span.began


_ACTIVE: ContextVar[Recorder | None] = ContextVar("active recorder", default=None)  # each thread has its own


class _Nothing:
    """A range while nothing is recorded."""

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
    """Let `recorder` see what this thread does as long as the block lasts. One inside another replaces it
    meanwhile."""
    token = _ACTIVE.set(recorder)
    try:
        yield recorder
    finally:
        _ACTIVE.reset(token)
