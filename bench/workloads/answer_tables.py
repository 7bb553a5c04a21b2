"""Tables of answers: policies or tasks by line; right answers, work and bytes by column."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from measuring.pages import markdown_table
from measuring.statistics import interval
from measuring.table import Row

from tiered.core.byte_size import format_bytes

# A column: a test for the rows of a line that it is about, and a function that shows them.
Show = Callable[[Sequence[Row]], str]
Column = tuple[Callable[[Row], bool], Show]


def pivot(rows: Iterable[Row], line: Callable[[Row], str], columns: Mapping[str, Column]) -> str:
    """Markdown: a line for each value of `line`. A cell without rows that are "ok" is empty."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(line(row), []).append(row)

    def cell(own: Sequence[Row], takes: Callable[[Row], bool], show: Show) -> str | None:
        found = [row for row in own if row["status"] == "ok" and takes(row)]
        return show(found) if found else None

    cells = [[name, *(cell(own, *column) for column in columns.values())] for name, own in lines.items()]
    return markdown_table(["", *columns], cells)


def by_task(rows: Sequence[Row]) -> str:
    """Right answers and forwards of an example: a line for each task, a column for each policy and commit rule."""
    columns = dict.fromkeys((row["policy"], row["rule"]) for row in rows if row["status"] == "ok")
    nfe = mean("nfe", 1)
    return pivot(
        [row for row in rows if "task" in row],
        task,
        {
            f"`{policy}`, {rule}": (where(policy=policy, rule=rule), lambda own: f"{right_of(own)}; {nfe(own)}")
            for policy, rule in columns
        },
    )


def where(**wanted: Any) -> Callable[[Row], bool]:
    """True if a row has these values; a row without such a column has None."""
    return lambda row: all(row.get(name) == value for name, value in wanted.items())


def policy(row: Row) -> str:
    """The policy's name on a page."""
    return f"`{row['policy']}`"


def task(row: Row) -> str:
    """The task's name on a page."""
    return f"`{row['task']}`" + (f", {row['size']} tokens" if row.get("size") else "")


def asked(rows: Sequence[Row]) -> int:
    """The number of examples."""
    return sum(row["examples"] for row in rows)


def asked_both(one: Row, other: Row) -> tuple[list[bool], list[bool]]:
    """True for right answers of each, to the examples that both were asked: the first ones."""
    pairs = zip(one["right"], other["right"], strict=False)
    first, second = ([each == "1" for each in answers] for answers in zip(*pairs, strict=True))
    return first, second


def right(rows: Sequence[Row]) -> str:
    """The share of right answers in per cent, with the bounds of its interval."""
    correct = sum(row["correct"] for row in rows)
    low, high = interval(correct, asked(rows))
    return f"{100 * correct / asked(rows):.3g} ({100 * low:.0f}–{100 * high:.0f})"  # noqa: RUF001


def right_of(rows: Sequence[Row]) -> str:
    """As `right`, with the number of examples."""
    return f"{right(rows)} of {asked(rows)}"


def mean(figure: str, digits: int = 2) -> Show:
    """A function that shows the mean of `figure` over all examples."""
    return lambda rows: f"{sum(row[figure] * row['examples'] for row in rows) / asked(rows):.{digits}f}"


def size(*names: str) -> Show:
    """A function that shows the bytes of these columns together, the most of any row."""
    return lambda rows: format_bytes(most) if (most := max(sum(row[n] for n in names) for row in rows)) else "0"
