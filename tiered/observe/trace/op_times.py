"""Books: the time of each operation, from the ranges of a recording, and what is told of it on a terminal."""

from collections import Counter
from dataclasses import dataclass

from tiered.core.byte_size import format_bytes
from tiered.core.ops import CONTAINERS, Op
from tiered.core.spans import Recorder
from tiered.tiers.stats import TierStats


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


def trace_report(recorder: Recorder, seconds: float, tiers: TierStats | None) -> str:
    """Time by operation, beside `seconds` of wall clock; and of copies, if there were `tiers`, what compute hid."""
    wall = 1e9 * seconds
    times = op_times(recorder)
    named = sum(time.ns for time in times)
    lines = [
        f"{1000 * seconds:.1f} ms in {len(recorder.kinds)} forwards, {100 * named / wall:.1f} % of it in operations:",
        f"{'operation':<14}{'ms':>10}{'share':>9}{'ranges':>9}",
        *(f"{time.op:<14}{time.ns / 1e6:>10.2f}{100 * time.ns / wall:>7.1f} %{time.count:>9}" for time in times),
    ]
    moved = [] if tiers is None else [(way, stats) for way, stats in tiers.ways.items() if stats.jobs]
    if moved:
        lines.append(f"{'copies':<14}{'bytes':>10}{'ms':>9}{'hidden':>9}{'exposed':>9}{'waits':>7}")
    for way, stats in moved:
        times_ms = "".join(f"{ns / 1e6:>9.2f}" for ns in (stats.busy_ns, stats.hidden_ns, stats.exposed_ns))
        lines.append(f"{way:<14}{format_bytes(stats.nbytes):>10}{times_ms}{stats.late:>7}")
    return "\n".join(lines)
