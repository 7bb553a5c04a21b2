"""A GPU day on a terminal: what is wrong, the targets, the parts, what was skipped, what is furthest from its floor.

Short, since only the end of a long output may come back from a lent machine.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpu_parts.results import STATUSES, status
from gpu_parts.targets import NOT_MEASURED, TARGETS, Target, read
from gpu_parts.wording import over_floors, reason, took

_MOST_WRONG, _MOST_SKIPS, _MOST_SLOW = 12, 6, 8
_WIDEST = 138


def show(day: Mapping[str, Any], console: Console) -> None:
    """At most 60 lines of 140 letters. `day`: what the file of one holds."""
    parts = day["parts"]
    _line(console, f"{day.get('device') or 'unknown device'}, {day.get('seconds')} s" + _ended(day))
    if day.get("rehearsal"):
        _line(console, f"REHEARSAL: {day.get('note', 'no figure in it means anything')}")
    for title, table in (
        ("Failed or wrong", _wrong(parts)),
        ("Targets", _targets(parts, rehearsal=bool(day.get("rehearsal")))),
        ("Parts", _parts(parts)),
        ("Skipped", _skipped(parts)),
        ("Furthest from their floors", _slow(parts)),
    ):
        if table.row_count:
            _line(console, title)
            console.print(table)


def _wrong(parts: Mapping[str, Any]) -> Table:
    table = _table(30, 104)
    rows = [(part, row) for part, row in _rows(parts) if status(row) in ("failed", "wrong")]
    for part, row in rows[:_MOST_WRONG]:
        _add(table, f"{part}: {row['case']}", f"{status(row)}: {reason(row)}")
    if len(rows) > _MOST_WRONG:
        _add(table, "", f"and {len(rows) - _MOST_WRONG} more, see the file")
    return table


def _targets(parts: Mapping[str, Any], *, rehearsal: bool) -> Table:
    table = _table(60, 10, 13, 52)
    for target in TARGETS:
        _add(table, target.name, target.asked, *_reading(target, parts, rehearsal=rehearsal))
    return table


def _reading(target: Target, parts: Mapping[str, Any], *, rehearsal: bool) -> tuple[str, str]:
    reading = read(target, parts)
    if reading.worst is None:
        return NOT_MEASURED, ""
    words = f"{target.words.format(reading.worst)} ({reading.case})"
    if reading.measured < reading.expected:
        words += f", {reading.measured} of {reading.expected} cases"
    return NOT_MEASURED if rehearsal else reading.verdict, words


def _parts(parts: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("part", "seconds", *STATUSES):
        table.add_column(title, justify="left" if title == "part" else "right")
    for name, part in parts.items():
        count = Counter(map(status, part["rows"]))
        _add(table, name, str(part["seconds"]), *(str(count[each] or "") for each in STATUSES))
    return table


def _skipped(parts: Mapping[str, Any]) -> Table:
    table = _table(30, 104)
    cases: dict[tuple[str, str], list[str]] = {}
    for part, row in _rows(parts):
        if status(row) == "skipped":
            cases.setdefault((part, reason(row)), []).append(row["case"])
    for (part, why), names in list(cases.items())[:_MOST_SKIPS]:
        _add(table, f"{part}: {names[0]}" if len(names) == 1 else f"{part}: {len(names)} cases", why)
    if len(cases) > _MOST_SKIPS:
        _add(table, "", f"and {sum(map(len, list(cases.values())[_MOST_SKIPS:]))} cases more, see the file")
    return table


def _slow(parts: Mapping[str, Any]) -> Table:
    table = _table(72, 16, 46)
    measured = [(part, row) for part, row in _rows(parts) if status(row) not in ("failed", "skipped")]
    found = [
        (over, f"{part}: {row['case']} {kind}", took(times))
        for part, row in measured
        for kind, over, times in over_floors(row)
    ]
    for over, case, words in sorted(found, reverse=True)[:_MOST_SLOW]:
        _add(table, case, f"{over:,.2f}x", words)
    return table


def _rows(parts: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, part in parts.items():
        for row in part["rows"]:
            yield name, row


def _ended(day: Mapping[str, Any]) -> str:
    return f", ended by {day['stopped_by']}" if day.get("stopped_by") else ""


def _table(*widths: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for width in widths:
        table.add_column(max_width=width, no_wrap=True, overflow="ellipsis")
    return table


def _add(table: Table, *cells: str) -> None:
    # Text: what a library says in brackets is no markup.
    table.add_row(*(Text(" ".join(cell.split())) for cell in cells))


def _line(console: Console, text: str) -> None:
    console.print(Text(text[:_WIDEST]))
