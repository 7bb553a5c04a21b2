"""What was left out of the report: each with its file, its place there and the reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reporting.fields import Field, row_problem

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """One thing that was not used. `place`: where in the file; "": all of it."""

    file: str
    place: str
    why: str


@dataclass(slots=True, kw_only=True)
class Source:
    """One input: what could be used of it.

    Attributes:
        file: its name as the page shows it.
        rows: that passed.
        head: what stands beside the rows, provenance among it.
        skipped: what did not pass.
        gap: why nothing is there; None: something is.
    """

    file: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)
    skipped: list[Skip] = field(default_factory=list)
    gap: str | None = None

    def skip(self, place: str, why: str) -> None:
        """Note that something was not used."""
        self.skipped.append(Skip(file=self.file, place=place, why=why))

    def passing(self, items: list[Any], fields: Mapping[str, Field], place: str) -> list[dict[str, Any]]:
        """Those that are as `fields` say; the others are skipped, as `place` and their number."""
        good = []
        for number, item in enumerate(items):
            fault = row_problem(item, fields)
            if fault is None:
                good.append(item)
            else:
                self.skip(f"{place} {number}", fault)
        return good


def shown_name(path: Path) -> str:
    """A file's name without the machine's folders: from the repository's root, or its own with its folder's."""
    path = path.absolute()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-2:])
