"""The figure of time by operation: where a call's milliseconds go, and whether they add up to the clock on the wall."""

from typing import Any

from reporting.bars import Bar, bar_panel
from reporting.figure import Cell, Figure, Group, Table, missing
from reporting.skips import Source
from reporting.svg import Panel
from reporting.wording import DASH, counted, listed, milliseconds, named, percent

NAME, TOPIC = "operations", "Time by operation"
HINT = "python bench/ops.py writes it."


def operation_figures(ops: Source) -> list[Figure]:
    """One figure, with a panel for every call."""
    calls = [call for call in ops.rows if call["ops"]]
    if not calls:
        return [missing(NAME, TOPIC, ops.gap or f"{ops.file} has no call with operations", HINT)]
    sums = [covered(call) for call in calls]
    figure = Figure(
        name=NAME,
        topic=TOPIC,
        headline=_sentence(calls[0]),
        caption="Time of all operations of a kind in a call; shares are of the wall clock. Operations add up to "
        f"{listed(sorted({percent(min(sums)), percent(max(sums))}))} of it. Panels have scales of their own.",
        groups=[Group(panels=[_panel(call) for call in calls])],
        tables=[_table(call) for call in calls],
        sources=[ops.file],
    )
    return [figure]


def covered(call: dict[str, Any]) -> float:
    """The sum of operations over the wall clock."""
    return call["sum_ms"] / call["wall_ms"] if call["wall_ms"] else 0.0


def _sorted(call: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(call["ops"], key=lambda op: -op["ms"])


def _sentence(call: dict[str, Any]) -> str:
    first, *rest = _sorted(call)[:3]
    words = f"In {named(call['name'])}, {first['op']} takes {percent(first['share'])} of the time"
    others = [f"{op['op']} {percent(op['share'])}" for op in rest]
    return f"{words}{', ' if rest else ''}{listed(others)}."


def _panel(call: dict[str, Any]) -> Panel:
    ops = _sorted(call)
    bars = [
        Bar(
            name=op["op"],
            parts=[(op["ms"], "var(--accent)")],
            shown=f"{milliseconds(op['ms'])} · {percent(op['share'])}",
            tip=f"{op['op']}\n{milliseconds(op['ms'])} in {counted(op['count'], 'range')}",
        )
        for op in ops
    ]
    beneath = f"{milliseconds(call['wall_ms'])} on the wall, {percent(covered(call))} of it below"
    label = f"time by operation of {call['name']}; the table below has the figures"
    return bar_panel(call["name"], bars, width=460.0, most=ops[0]["ms"], label=label, beneath=beneath)


def _table(call: dict[str, Any]) -> Table:
    rows = [
        [
            Cell(op["op"]),
            Cell(milliseconds(op["ms"]), op["ms"]),
            Cell(percent(op["share"]), op["share"]),
            Cell(str(op["count"]), op["count"]),
        ]
        for op in _sorted(call)
    ]
    wall = [
        Cell("wall clock"),
        Cell(milliseconds(call["wall_ms"]), call["wall_ms"]),
        Cell(percent(1.0), 1.0),
        Cell(DASH),
    ]
    return Table(name=call["name"], columns=("operation", "time", "share", "ranges"), rows=[*rows, wall])
