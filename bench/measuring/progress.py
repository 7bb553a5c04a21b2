"""Progress of a run and the time left, on stderr: a bar on a terminal, a line for every measurement elsewhere."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from measuring.point import Job
from measuring.runner import Ended

# Options of `print` for text that rich must leave as it is, on one line.
PLAIN: Any = {"markup": False, "highlight": False, "soft_wrap": True}
# Seconds expected of a point with these settings, of which no run was measured.
Guess = Callable[[Mapping[str, Any]], float]


class Expected:
    """Seconds that a job will take: as long as its point took before, else `guess` of its settings. Without a guess, it
    is the mean of all points."""

    def __init__(
        self,
        known: Mapping[tuple[str, int], Iterable[Mapping[str, Any]]],
        guess: Guess | None = None,
    ) -> None:
        self._guess, self._seconds = guess, dict[str, float]()
        for (key, _), rows in known.items():
            if (first := next(iter(rows), None)) is not None and first["status"] != "failed":
                self._seconds[key] = first["took_s"]

    def add(self, ended: Ended) -> None:
        """Take the time of a job that ended."""
        if ended.rows[0]["status"] in ("ok", "refused"):
            self._seconds[ended.job.point.key] = ended.seconds

    def seconds(self, jobs: Iterable[Job]) -> float | None:
        """Seconds of all `jobs`; None if nothing was measured and there is no guess."""
        guess = self._guess
        if guess is None:
            if not self._seconds:
                return None
            mean = sum(self._seconds.values()) / len(self._seconds)
            guess = lambda _: mean  # noqa: E731
        keys = ((job.point.key, job.point.settings) for job in jobs)
        return sum(self._seconds[key] if key in self._seconds else guess(settings) for key, settings in keys)


class Reporter:
    """Shows each measurement. `bar`: the bar of a terminal; None for lines."""

    def __init__(self, console: Console, total: int, bar: Progress | None) -> None:
        self._console, self._total, self._done, self._bar = console, total, 0, bar
        self._task = None if bar is None else bar.add_task("", total=total, left="")

    def ended(self, name: str, ended: Ended, left: float | None) -> None:
        """Show one measurement. `left`: seconds that the rest will take; None if unknown."""
        self._done += 1
        statuses = ", ".join(dict.fromkeys(row["status"] for row in ended.rows))
        why = next((row["why"] for row in ended.rows if row.get("why")), None)
        line = f"{name} run {ended.job.run}: {statuses}, {ended.seconds:.1f} s" + (f" ({why})" if why else "")
        told = "" if left is None or self._done == self._total else f"{duration(left)} left"
        if self._bar is None or self._task is None:
            self._console.print(f"[{self._done}/{self._total}] {line}" + (f"; {told}" if told else ""), **PLAIN)
            return
        if why:
            self._console.print(line, **PLAIN)
        self._bar.update(self._task, completed=self._done, description=escape(name), left=told)


@contextmanager
def reporting(total: int, console: Console) -> Iterator[Reporter]:
    """A reporter of `total` measurements."""
    if not console.is_terminal:
        yield Reporter(console, total, None)
        return
    left, name = TextColumn("{task.fields[left]}"), TextColumn("{task.description}")
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), left, name)
    with Progress(*columns, console=console, transient=True) as bar:
        yield Reporter(console, total, bar)


def duration(seconds: float) -> str:
    """`seconds` in the two largest units: `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
