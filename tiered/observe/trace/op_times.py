"""Books: the time of each operation, from the ranges of a recording."""

from collections import Counter
from dataclasses import dataclass

from tiered.core.ops import CONTAINERS, Op
from tiered.core.recorder import Recorder


@dataclass(frozen=True, slots=True)
class OpTime:
    """All ranges of one operation.

    Attributes:
        op: which.
        ns: their time, without that of ranges inside them.
        count: how many there were.
    """

    op: Op
    ns: int
    count: int


def op_times(recorder: Recorder) -> list[OpTime]:
    """The operations that were recorded, the longest first. Their sum is the time that has a name; what is left of the
    wall clock was spent between ranges, or in those that only hold others (`CONTAINERS`)."""
    own: Counter[Op] = Counter()
    count: Counter[Op] = Counter()
    for span in recorder.spans:
        if span.op not in CONTAINERS:
            own[span.op] += span.own_ns
            count[span.op] += 1
    return [OpTime(op, own[op], count[op]) for op in sorted(own, key=lambda op: -own[op])]
