"""Ranges of the code with their times, without a profiler: a range takes a few microseconds."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiered.core.ops import CONTAINERS, Op
from tiered.core.spans import Recorder


@dataclass(slots=True)
class Timed:
    """One range.

    Attributes:
        op, layer, forward: as in `tiered.core.spans.Span`.
        outer: the range around it; None for an outermost one.
        began, ended: ns of `time.monotonic_ns`; `ended` is 0 while the range is open.
        inside_ns: time of the ranges directly inside it.
    """

    op: Op
    layer: int | None
    forward: int | None
    outer: "Timed | None"
    began: int
    ended: int = 0
    inside_ns: int = 0

    @property
    def ns(self) -> int:
        """Time of the range."""
        return self.ended - self.began

    @property
    def own_ns(self) -> int:
        """Time of the range without the ranges inside it."""
        return self.ns - self.inside_ns


class Timing(Recorder):
    """A recorder that times its ranges, which are in `ranges` in the order in which they began. Its own work counts for
    the range."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        """`wait`: called at both ends of a range, to wait for a device whose time is to count."""
        super().__init__()
        self.ranges: list[Timed] = []
        self._wait, self._open = wait, list[Timed]()

    def enter(self, span: Any) -> None:
        """`span` begins."""
        self._wait()
        began = time.monotonic_ns()
        super().enter(span)
        outer = self._open[-1] if self._open else None
        self._open.append(Timed(span.op, span.layer, span.forward, outer, began))
        self.ranges.append(self._open[-1])

    def leave(self, span: Any) -> None:
        """`span` ends."""
        super().leave(span)
        timed = self._open.pop()
        self._wait()
        timed.ended = time.monotonic_ns()
        if timed.outer is not None:
            timed.outer.inside_ns += timed.ns

    def by_op(self) -> dict[Op, tuple[int, int]]:
        """Own time (ns) and number of ranges of each operation, the longest first; `CONTAINERS` are left out."""
        found = defaultdict[Op, list[int]](list)
        for timed in self.ranges:
            if timed.op not in CONTAINERS:
                found[timed.op].append(timed.own_ns)
        return {op: (sum(own), len(own)) for op, own in sorted(found.items(), key=lambda item: -sum(item[1]))}
