"""What the project wants to reach on an H100, and how each target is read from the rows of a GPU day. Books.

A target counts as met only where every row that it rests on was measured and is within the limit.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_parts.results import status

Row = Mapping[str, Any]
NOT_MEASURED, OK, MISSED = "not measured", "ok", "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One target.

    Attributes:
        name: what is looked at.
        part: whose rows say it.
        cases: a regular expression; those whose whole name it matches are read.
        value: what a row says; None or a `LookupError`: nothing about this.
        limit: that no row's value may exceed, or, with `at_least`, fall short of.
        words: how a value is written.
    """

    name: str
    part: str
    cases: str
    value: Callable[[Row], float | None]
    limit: float
    at_least: bool = False
    words: str = "{:.3f}"

    @property
    def asked(self) -> str:
        """The limit in words."""
        return f"{'>=' if self.at_least else '<='} {self.words.format(self.limit)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the rows say of a target.

    Attributes:
        verdict: `OK`, `MISSED` or `NOT_MEASURED`.
        worst: of the values; None where there is none.
        case: it is of this one.
        measured, expected: rows that have a value, and that should.
    """

    verdict: str
    worst: float | None
    case: str
    measured: int
    expected: int


def read(target: Target, parts: Mapping[str, Any]) -> Reading:
    """The worst of what the rows of `parts`, by name as in the file, say of `target`."""
    rows = [row for row in parts.get(target.part, {"rows": []})["rows"] if re.fullmatch(target.cases, row["case"])]
    values = {row["case"]: value for row in rows if (value := _value(target, row)) is not None}
    if not values:
        return Reading(verdict=NOT_MEASURED, worst=None, case="", measured=0, expected=len(rows))
    case = (min if target.at_least else max)(values, key=lambda case: values[case])
    worst = values[case]
    if not (worst >= target.limit if target.at_least else worst <= target.limit):
        verdict = MISSED
    else:
        verdict = OK if len(values) == len(rows) else NOT_MEASURED
    return Reading(verdict=verdict, worst=worst, case=case, measured=len(values), expected=len(rows))


def _value(target: Target, row: Row) -> float | None:
    if status(row) in ("failed", "skipped"):
        return None
    try:
        value = target.value(row)
    except (LookupError, TypeError):
        return None
    return None if value is None else float(value)


_CACHED = "(fast_dllm_dual|polestar_resident|polestar_raw|polestar_delta)"
TARGETS = (
    Target(
        name="a plain block step at 1k positions over its floor",
        part="steps",
        cases=f"{_CACHED} 1024",
        value=lambda row: row["kinds"]["step"]["over_floor"],
        limit=1.3,
    ),
    Target(
        name="an update step over its own floor",
        part="steps",
        cases="polestar_.*",
        value=lambda row: row["kinds"]["update"]["over_floor"],
        limit=1.5,
    ),
    Target(
        name="fetches of records >= 64 KiB over the copy peak",
        part="fetches",
        cases=r"(64|[7-9]\d|[1-9]\d\d+) KiB chosen",
        value=lambda row: row["over_peak"],
        limit=0.9,
        at_least=True,
    ),
    Target(
        name="fetch time hidden at 32k positions",
        part="steps",
        cases="polestar_(raw|delta) 32768",
        value=lambda row: row["copies"]["fetch"]["hidden_share"],
        limit=0.95,
        at_least=True,
        words="{:.1%}",
    ),
    Target(
        name="offloaded raw the same as resident, bit for bit",
        part="exactness",
        cases="raw, offloaded, resident",
        value=lambda row: float(row["ok"]),
        limit=1,
        at_least=True,
        words="{:.0f}",
    ),
    Target(
        name="device bytes off the plan",
        part="steps",
        cases=".*",
        value=lambda row: abs(row["memory"]["plan_difference_share"]),
        limit=0.01,
        words="{:.2%}",
    ),
    Target(
        name="positions that ran under 24 GiB over fast_dllm_dual's most",
        part="budget",
        cases="polestar_delta, host 64GiB",
        value=lambda row: row["ran_over_fast_dllm_dual"],
        limit=1,
        at_least=True,
        words="{:.2f}",
    ),
)
