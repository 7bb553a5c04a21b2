"""How far a sweep is, on stderr: a bar on a terminal, a line for every measurement elsewhere."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sweeping.measurement import Measurement
from sweeping.point import Point
from sweeping.processes import Job

# How text that is not ours is printed: as it is, on one line.
PLAIN: Any = {"markup": False, "highlight": False, "soft_wrap": True}


class Expected:
    """Seconds that a measurement will take, from those that were: of its like where there are some, else of all."""

    def __init__(self, points: Iterable[Point], measurements: Mapping[tuple[str, int], Measurement]) -> None:
        self._all: list[float] = []
        self._alike: dict[tuple[object, ...], list[float]] = {}
        by_key = {point.key: point for point in points}
        for (key, _), measurement in measurements.items():
            if key in by_key and not measurement.failed:
                self.add(by_key[key], measurement.seconds)

    def add(self, point: Point, seconds: float) -> None:
        """That of one that ended."""
        self._all.append(seconds)
        self._alike.setdefault(self._kind(point), []).append(seconds)

    def seconds(self, jobs: Iterable[Job], at_a_time: int = 1) -> float | None:
        """Of all `jobs`; None as long as nothing was measured."""
        if not self._all:
            return None
        total = 0.0
        for point, _ in jobs:
            own = self._alike.get(self._kind(point), self._all)
            total += sum(own) / len(own)
        return total / at_a_time

    @staticmethod
    def _kind(point: Point) -> tuple[object, ...]:
        return point.policy, point.context, point.batch, point.budget_bytes, point.confidence


class Reporter:
    """Says what was measured. `bar` and its number: on a terminal."""

    def __init__(self, console: Console, total: int, bar: Progress | None) -> None:
        self._console, self._total, self._done, self._bar = console, total, 0, bar
        self._task = None if bar is None else bar.add_task("", total=total, left="")

    def ended(self, job: Job, measurement: Measurement, left: float | None) -> None:
        """One measurement; `left`: seconds that the rest will take."""
        self._done += 1
        statuses = dict.fromkeys(row["status"] for row in measurement.rows)
        why = next((row["why"] for row in measurement.rows if row["why"]), None)
        line = f"{job[0]} run {job[1]}: {', '.join(statuses)}, {measurement.seconds:.1f} s"
        line += f" ({why})" if why else ""
        if self._bar is None or self._task is None:
            ending = "" if left is None or self._done == self._total else f"; {duration(left)} left"
            self._console.print(f"[{self._done}/{self._total}] {line}{ending}", **PLAIN)
            return
        if why:
            self._console.print(line, **PLAIN)
        left_text = "" if left is None else f"{duration(left)} left"
        self._bar.update(self._task, completed=self._done, description=escape(str(job[0])), left=left_text)


@contextmanager
def reporting(total: int, console: Console) -> Iterator[Reporter]:
    """A reporter of `total` measurements."""
    if not console.is_terminal:
        yield Reporter(console, total, None)
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Reporter(console, total, bar)


def duration(seconds: float) -> str:
    """In the two largest units: `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
