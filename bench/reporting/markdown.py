"""report.md: the sentences, the images and the tables, for pull requests."""

import re
from collections.abc import Sequence

from reporting.figure import Cell, Figure, Table
from reporting.report import Report
from reporting.wording import DASH, pieces, without_marks

MOST_ROWS = 60  # of a table; the page has them all


def markdown(report: Report, images: Sequence[str], command: str) -> str:
    """The page as Markdown. `images`: names of the figures that have files beside it."""
    parts = ["# Where the bytes are, and what they buy"]
    parts.append("\n".join(f"- {escaped(name)}: {escaped(fact)}" for name, fact in report.facts))
    if report.gaps:
        parts.append(f"Not given: {escaped('; '.join(report.gaps))}.")
    for figure in report.figures:
        parts += _figure(figure, figure.name in images)
    for table, title in ((report.lost, "Points and rows without figures"), (report.skipped, "Left out of this report")):
        if table.rows:
            parts += [f"## {title}", _table(table)]
    parts.append("## What made the files")
    for row in report.made.rows:
        rest = "; ".join(
            f"{name} {cell.shown}"
            for name, cell in zip(report.made.columns[2:], row[2:], strict=True)
            if cell.value or cell.shown != DASH
        )
        parts.append(f"{escaped(row[0].shown)}: {code(row[1].shown)}  \n{escaped(rest)}")
    parts.append(f"This page: {code(command)}")
    return "\n\n".join(parts) + "\n"


def _figure(figure: Figure, has_image: bool) -> list[str]:
    parts = [f"## {escaped(figure.topic)}"]
    if figure.gap is not None:
        return [*parts, f"Cannot be shown: {coded(figure.gap)}"]
    parts.append(f"**{coded(figure.headline)}**")
    if has_image:
        parts.append(f"![{escaped(without_marks(figure.headline))}]({figure.name}.svg)")
    parts.append(coded(figure.caption))
    parts += [coded(note) for note in figure.notes]
    for table in figure.tables:
        parts.append(f"<details><summary>{escaped(table.name)}</summary>\n\n{_table(table)}\n\n</details>")
    return parts


def _table(table: Table) -> str:
    heads = [escaped(column) or " " for column in table.columns]
    rows = [_row(row) for row in table.rows[:MOST_ROWS]]
    more = len(table.rows) - MOST_ROWS
    tail = [f"\n{more} more rows are on the page."] if more > 0 else []
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, *tail])


def _row(row: Sequence[Cell]) -> str:
    return f"| {' | '.join(escaped(cell.shown) for cell in row)} |"


def escaped(words: str) -> str:
    """Words that Markdown, and HTML within it, take as they are."""
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_[]|":
        words = words.replace(sign, f"\\{sign}")
    return re.sub(r"\s+", " ", words)


def coded(sentence: str) -> str:
    """A sentence with its names as code."""
    return "".join(code(part) if name else escaped(part) for part, name in pieces(sentence))


def code(words: str) -> str:
    """Words between as many backticks as none within them can close."""
    ticks = "`"
    while ticks in words:
        ticks += "`"
    return f"{ticks}{' '.join(words.split())}{ticks}"
