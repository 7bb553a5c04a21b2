"""Tables as Markdown, and the parts of pages that they fill: between `<!-- name -->` and `<!-- /name -->`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered.core.whole_file import write_then_rename


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A line for each row; the first column is text, the others are figures. None is an empty cell."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    lines += [["" if cell is None else str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_table(name: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each row of measurements: `name`, and the text of each column, with the row's figures in their braces.
    A cell without its figure is empty. A row that is not "ok" says why."""
    lines = []
    for row in rows:
        cells = [_filled(text, row) for text in columns.values()]
        if row["status"] != "ok":
            cells = [row["why"], *[None] * (len(columns) - 1)]
        lines.append([name.format_map(row), *cells])
    return markdown_table(["", *columns], lines)


def _filled(text: str, row: Mapping[str, Any]) -> str | None:
    try:
        return text.format_map(row)
    except KeyError:
        return None


def between_marks(text: str, mark: str) -> str | None:
    """The text between the marks; None without them."""
    _, begin, rest = text.partition(f"<!-- {mark} -->")
    inside, end, _ = rest.partition(f"<!-- /{mark} -->")
    return inside.strip() if begin and end else None


def fill_marks(path: Path, tables: Mapping[str, str]) -> list[str]:
    """Put each of `tables` between its marks in the page, if it has them. Returns the marks that were filled.

    Raises:
        ValueError: the page has none of the marks.
    """
    text, filled = path.read_text(encoding="utf-8"), []
    for mark, inside in tables.items():
        if between_marks(text, mark) is not None:
            begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
            text = f"{text.partition(begin)[0]}{begin}\n{inside}\n{end}{text.partition(end)[2]}"
            filled.append(mark)
    if not filled:
        raise ValueError(f"{path} has no <!-- {next(iter(tables), '')} --> with its end behind it")
    write_then_rename(path, lambda part: part.write_text(text, encoding="utf-8"))
    return filled
