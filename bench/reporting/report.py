"""The report as a whole: its figures in their order, the facts on top, and what made each file."""

from dataclasses import dataclass
from typing import Any

from reporting.copies import copy_figures
from reporting.drift import drift_figures
from reporting.figure import Cell, Figure, Table
from reporting.knobs import knob_figures
from reporting.operations import operation_figures
from reporting.pareto import pareto_figures
from reporting.sources import Sources
from reporting.throughput import throughput_figures
from reporting.timeline import timeline_figures
from reporting.wording import DASH, counted, listed

# Those that have files of their own, for pages such as README.md.
MAIN = ("pareto", "accuracy", "bytes_over_steps")
PROVENANCE = (
    "command",
    "revision",
    "processor",
    "device",
    "threads",
    "python",
    "torch",
    "transformers",
    "model",
    "weights_sha256",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page tells.

    Attributes:
        figures: in order.
        facts: name and figure of each, for the top.
        gaps: sentences about inputs that are missing.
        skipped, lost, made: rows that were left out, points without figures, and what made each file.
    """

    figures: list[Figure]
    facts: list[tuple[str, str]]
    gaps: list[str]
    skipped: Table
    lost: Table
    made: Table


def report_of(sources: Sources) -> Report:
    """All of it."""
    points = sources.points
    figures = [
        *pareto_figures(sources.sweep, points, sources.compare),
        *knob_figures(sources.sweep, points),
        *timeline_figures(sources.memory),
        *copy_figures(sources.overlap, sources.memory),
        *drift_figures(sources.memory),
        *operation_figures(sources.ops),
        *throughput_figures(sources.throughput),
    ]
    skipped = [[Cell(skip.file), Cell(skip.place or "all of it"), Cell(skip.why)] for skip in sources.skipped]
    lost = [
        [Cell(point.label), Cell(_call(point.settings)), Cell(point.status), Cell(point.why or DASH)]
        for point in points
        if point.status != "ok" or point.lost
    ]
    refused: dict[tuple[str, str, str], list[str]] = {}
    for row in sources.compare.rows:
        if "why" in row:
            refused.setdefault((row["policy"], row["commit"], row["why"]), []).append(row["task"])
    lost += [
        [Cell(policy), Cell(f"{commit}: {', '.join(dict.fromkeys(tasks))}"), Cell("refused"), Cell(why)]
        for (policy, commit, why), tasks in refused.items()
    ]
    return Report(
        figures=figures,
        facts=_facts(sources),
        gaps=sources.gaps,
        skipped=Table(name="Left out", columns=("file", "where", "why"), rows=skipped),
        lost=Table(name="Without figures", columns=("who", "call", "what became of it", "why"), rows=lost),
        made=_made(sources),
    )


def _call(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {settings[name]}"
        for name in ("context", "batch", "budget", "confidence")
        if settings[name] is not None
    )


def _facts(sources: Sources) -> list[tuple[str, str]]:
    points = sources.points
    statuses = [
        counted_status for status in ("refused", "failed") if (counted_status := _status(points, status)) is not None
    ]
    facts = []
    if points:
        ok = sum(point.status == "ok" for point in points)
        runs = max(len({row["run"] for row in point.rows}) for point in points) if ok else 0
        facts += [("points of the sweep", listed([f"{ok} measured", *statuses]))]
        facts += [("runs of a point", str(runs))] if runs else []
    for name in ("model", "processor"):
        values = list(dict.fromkeys(str(value) for source in sources.all() if (value := source.head.get(name))))
        if name == "model":
            values = list(dict.fromkeys([*(point.settings["model"] for point in points), *values]))
        facts += [(name, ", ".join(values))] if values else []
    skipped = len(sources.skipped)
    facts.append(
        ("left out", counted(skipped, "row or file").replace("row or files", "rows or files") if skipped else "nothing")
    )
    return facts


def _status(points: list[Any], status: str) -> str | None:
    number = sum(point.status == status for point in points)
    return f"{number} {status}" if number else None


def _made(sources: Sources) -> Table:
    rows = [
        [
            Cell(source.file),
            *(Cell(str(source.head[name]) if source.head.get(name) is not None else DASH) for name in PROVENANCE),
        ]
        for source in sources.all()
        if source.gap is None
    ]
    return Table(name="What made the files", columns=("file", *PROVENANCE), rows=rows)
