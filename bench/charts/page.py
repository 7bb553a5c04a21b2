"""report.html, one page that needs no network and runs no script, and report.md for pull requests."""

import re
from collections.abc import Sequence
from pathlib import Path

from measuring.pages import markdown_table

from charts.picture import Figure, Source
from charts.rows import Row, shown
from charts.theme import css, inlined
from tiered.core.extras import needing

with needing("bench"):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

TITLE = "Where each policy earns its place, and where the bytes are"
LOST = ("study", "status", "points", "why", "which")
MOST_ROWS = 60  # rows of a table in Markdown; the page has all


def html(figures: Sequence[Figure], sources: Sequence[Source], command: str) -> str:
    """The page. `command`: command line that made it."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["coded"] = lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
    environment.globals |= {"inlined": lambda *of: Markup(inlined(*of)), "shown": shown, "css": Markup(css())}
    template = environment.get_template("page.html.j2")
    return template.render(title=TITLE, figures=figures, sources=sources, command=command, lost=LOST)


def markdown(figures: Sequence[Figure], images: Sequence[str], command: str) -> str:
    """The page in Markdown. `images`: names of figures that have files beside it."""
    parts = [f"# {TITLE}"]
    for figure in figures:
        parts.append(f"## {figure.picture.topic}")
        if figure.rows:
            parts.append(f"**{figure.says}.**")
            if figure.picture.name in images:
                parts.append(f"![{figure.says.replace('`', '')}]({figure.picture.name}.svg)")
            more = f"\n\n{len(figure.rows) - MOST_ROWS} more rows are on the page." if figure.rows[MOST_ROWS:] else ""
            rows = f"{table(figure.columns, figure.rows[:MOST_ROWS])}{more}"
            parts += [figure.caption, f"<details><summary>The figures as a table</summary>\n\n{rows}\n\n</details>"]
        parts += [f"Missing: {gap}" for gap in figure.gaps]
        parts += [f"Without figures:\n\n{table(LOST, figure.lost)}"] if figure.lost else []
    return "\n\n".join([*parts, f"`{command}`"]) + "\n"


def table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows as a table in Markdown, with its signs escaped."""
    lines = [[re.sub(r"([\\`*_<\[\]])", r"\\\1", shown(column, row.get(column))) for column in columns] for row in rows]
    return markdown_table([column.replace("_", " ") for column in columns], lines)
