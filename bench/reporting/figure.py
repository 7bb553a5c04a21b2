"""A figure of the report: its sentence, its panels and the numbers in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from reporting.svg import Panel


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: what it shows, and the figure behind it, unrounded (None: no figure)."""

    shown: str
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: heads of the columns, and rows. A column is of figures where its first row has one."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Panels that belong together, for a screen and for a phone (none: the same). `open`: shown at once."""

    title: str = ""
    panels: Sequence[Panel]
    narrow: Sequence[Panel] = ()
    open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure.

    Attributes:
        name: its anchor, and the name of its files.
        topic: what it is about, in two or three words.
        headline: what it shows, a sentence made from the figures.
        caption: how to read it.
        groups: what is drawn; none where `gap` says what is missing.
        tables: the figures.
        sources: files that they come from.
    """

    name: str
    topic: str
    headline: str
    caption: str = ""
    groups: Sequence[Group] = ()
    tables: Sequence[Table] = ()
    sources: Sequence[str] = ()
    gap: str | None = None
    notes: Sequence[str] = field(default=())


def missing(name: str, topic: str, gap: str, hint: str) -> Figure:
    """A figure that has no input. `hint`: the command that makes it."""
    return Figure(name=name, topic=topic, headline=f"{topic} cannot be shown.", gap=f"{gap}. {hint}")
