"""Rows of a sweep as points: the settings, and what their runs and tasks measured together."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from reporting.schemas import SETTINGS

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure: its mean over runs, and the least and the most that a run had."""

    value: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting of a sweep.

    Attributes:
        name: its hash.
        settings: by name.
        options: all that the policy was given.
        status: "ok" where any run has figures, or else what became of the first.
        why: the reason of the first run without figures.
        rows: with figures, one for each task of each run.
        lost: runs without figures.
    """

    name: str
    settings: dict[str, Any]
    options: dict[str, Any]
    status: str
    why: str | None
    rows: list[Row]
    lost: int

    @property
    def label(self) -> str:
        """C, M and T, where it has them."""
        knobs = {"C": self.clusters, "M": self.settings["top_m"], "T": self.settings["update_threshold"]}
        parts = [f"{knob} {value}" for knob, value in knobs.items() if value is not None]
        return f"{self.settings['policy']} · {' '.join(parts)}" if parts else self.settings["policy"]

    @property
    def clusters(self) -> int | str | None:
        """C; "auto" where the options say so."""
        return "auto" if self.options.get("clusters") == "auto" else self.settings["clusters"]

    @property
    def tasks(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(row["task"] for row in self.rows))

    def spread(self, of: Callable[[list[Row]], float | None], tasks: Iterable[str] | None = None) -> Spread | None:
        """A figure of each run, made from its rows of these tasks; None where no run has it."""
        wanted = None if tasks is None else set(tasks)
        runs: dict[int, list[Row]] = {}
        for row in self.rows:
            if wanted is None or row["task"] in wanted:
                runs.setdefault(row["run"], []).append(row)
        figures = [figure for rows in runs.values() if (figure := of(rows)) is not None]
        if not figures:
            return None
        return Spread(value=sum(figures) / len(figures), low=min(figures), high=max(figures), runs=len(figures))


def points_of(rows: Iterable[Row]) -> list[Point]:
    """Rows by point, in the order in which each first comes."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["point"], []).append(row)
    return [_point(name, group) for name, group in groups.items()]


def _point(name: str, rows: list[Row]) -> Point:
    good = [row for row in rows if row["status"] == "ok"]
    bad = [row for row in rows if row["status"] != "ok"]
    return Point(
        name=name,
        settings={setting: rows[0][setting] for setting in SETTINGS},
        options=json.loads(rows[0]["policy_options"]),
        status="ok" if good else bad[0]["status"],
        why=bad[0]["why"] if bad else None,
        rows=good,
        lost=len({row["run"] for row in bad}),
    )


def wilson(correct: int, examples: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share that was `correct` of `examples`; Wilson 1927."""
    share, square = correct / examples, z * z
    middle = (share + square / (2 * examples)) / (1 + square / examples)
    half = z * sqrt(share * (1 - share) / examples + square / (4 * examples**2)) / (1 + square / examples)
    return max(0.0, middle - half), min(1.0, middle + half)
