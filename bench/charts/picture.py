"""Figures of the report, drawn from the tables of studies, and points that have no figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring.statistics import merged
from measuring.store import read_rows
from measuring.study import study_named

from charts.rows import Row, good, words
from charts.theme import NARROW, WIDE, svg


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the report: its name and topic, the module that draws it, and the studies. `of`: arguments of the
    module, if it can draw several figures."""

    name: str
    topic: str
    module: ModuleType
    studies: Sequence[str]
    of: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Source:
    """A study's rows, runs merged, and their origins. `gap`: why there are no rows; None if there are."""

    study: str
    rows: list[Row] = field(default_factory=list)
    stamps: list[Mapping[str, Any]] = field(default_factory=list)
    gap: str | None = None


@dataclass(slots=True, kw_only=True)
class Figure:
    """A picture of the rows that exist. Without rows it has `gaps` alone. `lost`: points without figures, and why."""

    picture: Picture
    gaps: list[str]
    lost: list[Row]
    rows: list[Row]
    columns: list[str] = field(default_factory=list)
    says: str = "nothing to show yet"
    caption: str = ""
    drawn: dict[str, str] = field(default_factory=dict)


def read_source(folder: Path, study: str) -> Source:
    """The rows of a study, from its folder in `folder`."""
    try:
        rows, about = read_rows(folder / study)
        if about["study"] != study:
            raise ValueError(f"its rows are of the study {about['study']}")
        module = study_named(study)
        rows = [row | {"study": study} for row in merged(rows, of=module.OF, timed=module.TIMED)]
        return Source(study, rows, list(about["stamps"].values()))
    except FileNotFoundError:
        why = "is not there"
    except (ValueError, KeyError, ImportError) as error:
        why = f"cannot be used: {error}"
    return Source(study, gap=f"`{study}/rows.parquet` {why}; `python bench/measure.py {study}` makes it")


def figure_of(picture: Picture, sources: Mapping[str, Source]) -> Figure:
    """Draw `picture` from the studies that are there."""
    own, module = [sources[name] for name in picture.studies], picture.module
    raw = [row for source in own for row in source.rows]
    rows = getattr(module, "table", good)(raw)
    figure = Figure(picture=picture, gaps=[s.gap for s in own if s.gap], lost=lost(raw, module.COLUMNS), rows=rows)
    if not rows:
        figure.gaps = figure.gaps or [f"no row of {' or '.join(picture.studies)} has a figure for it"]
        return figure
    figure.columns = [column for column in module.COLUMNS if any(column in row for row in rows)]
    figure.says = module.says(rows, **picture.of)
    figure.caption = " ".join((module.__doc__ or "").split())
    if any(len(source.stamps) > 1 for source in own):
        figure.caption += " Rows are of several machines or revisions: compare no speeds among them."
    figure.caption += " Rows: " + ", ".join(f"`python bench/measure.py {s.study}`" for s in own if s.rows)
    sizes = {"wide": WIDE, "narrow": NARROW}
    figure.drawn = {name: svg(module.chart(rows, width, **picture.of)) for name, width in sizes.items()}
    return figure


def lost(rows: Sequence[Row], columns: Sequence[str]) -> list[Row]:
    """Refused and failed points, a row for each reason: their number, and the settings of `columns` in which points
    differ."""
    differ = [name for name in columns if len({str(row.get(name)) for row in rows}) > 1]
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        if row["status"] != "ok":
            which = words(row, [name for name in differ if name in row])
            found.setdefault((row["study"], row["status"], row.get("why", "")), {})[row["point"]] = which
    return [
        {"study": study, "status": status, "points": len(own), "why": why, "which": "; ".join(own.values())}
        for (study, status, why), own in found.items()
    ]
