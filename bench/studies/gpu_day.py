"""Checks and measurements that need a GPU: exactness, speed, and the books of memory. See bench/gpu_day.py.

A part is a module of bench/gpu_parts. `cases(setting)` names its cases, in order, and starts no kernel.
`measure(setting, case)` is the row of a case, with `ok` and `why` if something was checked. A case may use work of
earlier cases of the part in the same process. `--quick`: tiny sizes, which mean nothing.
"""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from gpu_parts.setting import Setting
from measuring.pages import markdown_table
from measuring.point import Row
from measuring.study import Axes

NOT_MEASURED, OK, MISSED = "not measured", "ok", "missed"
STATUSES = ("ok", "failed", "skipped")
_MOST_FAILED, _MOST_SKIPPED, _MOST_SLOW = 9, 4, 5
_WIDEST = 100  # characters of a cell


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds that a part may take, whose rest the next part may use, and seconds of one case."""

    seconds: float
    case_seconds: float


# The parts that others rest on come first: a wrong kernel makes every later figure worthless.
PARTS = {
    "machine": Part(10, 10),
    "kernels": Part(55, 30),  # before the tests, which find its kernels compiled: Triton keeps them
    "gpu_tests": Part(150, 150),
    "sanitizer": Part(110, 90),
    "copies": Part(10, 10),
    "fetches": Part(15, 15),
    "floors": Part(20, 15),
    "exactness": Part(25, 20),
    "steps": Part(85, 45),
    "budget": Part(40, 30),
    "profile": Part(20, 30),
    "weights": Part(400, 120),
    "serving": Part(120, 120),
}
APART = ("weights", "serving")  # nine minutes have no room for them: they run if `--parts` names them
AXES: Axes = {"part": [name for name in PARTS if name not in APART], "size": ["full"]}
QUICK: Axes = {"part": ["machine", "copies"], "size": ["tiny"]}
OF, TIMED = ("part", "case"), ()


@dataclass(frozen=True, slots=True)
class Target:
    """One target.

    Attributes:
        name: the figure in words.
        part, cases: part of the rows, and regular expression for whole names of their cases.
        figure: column of a row, with a dot for each level; its sign does not count.
        limit: bound that no row's figure may exceed, or, with `at_least`, fall short of.
        words: format of a figure.
    """

    name: str
    part: str
    cases: str
    figure: str
    limit: float
    at_least: bool = False
    words: str = "{:.3f}"

    @property
    def asked(self) -> str:
        """The limit in words."""
        return f"{'≥' if self.at_least else '≤'} {self.words.format(self.limit)}"


class Reading(NamedTuple):
    """The `worst` figure of a target (None for none), its case, and the numbers of rows that have one and should."""

    verdict: str
    worst: float | None = None
    case: str = ""
    measured: int = 0
    expected: int = 0


# Goals of the project on an H100.
_CACHED = "(fast_dllm_dual|polestar_resident|polestar_raw|polestar_delta)"
TARGETS = (
    Target(
        "a plain block step at 1k positions, over its floor", "steps", f"{_CACHED} 1024", "kinds.step.over_floor", 1.3
    ),
    Target("an update step, over its own floor", "steps", "polestar_.*", "kinds.update.over_floor", 1.5),
    Target(
        "fetches of records from 64 KiB, over the copy peak",
        *("fetches", r"(64|[7-9]\d|[1-9]\d\d+) KiB scattered", "over_peak", 0.9, True),
    ),
    Target(
        "fetch time that is hidden at 32k positions",
        *("steps", "polestar_(raw|delta) 32768", "copies.fetch.hidden_share", 0.95, True, "{:.1%}"),
    ),
    Target(
        "offloaded raw records give what resident ones give, bit for bit",
        *("exactness", "raw, offloaded, resident", "ok", 1, True, "{:.0f}"),
    ),
    Target(
        "device bytes at the peak, off the plan",
        *("steps", ".*", "memory.plan_difference_share", 0.01, False, "{:.2%}"),
    ),
    Target(
        "positions that ran under 24 GiB, over the most of `fast_dllm_dual`",
        *("budget", "polestar_delta, host 64GiB", "ran_over_fast_dllm_dual", 1, True, "{:.2f}"),
    ),
    Target(
        "a step under 12 GiB, over the longer of computing and copying", "weights", "raw, 12GiB", "over_bound", 1.15
    ),
    Target("a forward under 12 GiB, over accelerate's", "weights", "accelerate, 12GiB", "ours_over_it", 1.0),
    Target(
        "tokens a second of 16 clients, over one at a time",
        *("serving", "together", "tokens_per_second_over_one_at_a_time", 3, True, "{:.2f}"),
    ),
)


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Every case of each part; a part that cannot be imported has a single case."""
    for size in axes["size"]:
        for part in axes["part"]:
            try:
                cases = _module(part).cases(Setting(device="cpu", tiny=size == "tiny", seed=0))
            except Exception:  # the part cannot be imported here: its process says so, in a row
                cases = [""]
            yield from ({"part": part, "case": case, "size": size} for case in cases)


def measure(settings: Mapping[str, Any], stem: str | None = None) -> list[Row]:
    """The row of a case; `stem`: as of `Setting`."""
    from tiered.offload.device import computing_on

    tiny = settings["size"] == "tiny"
    setting = Setting(device=settings["device"], tiny=tiny, seed=settings["seed"], stem=stem)
    with computing_on(setting.on):  # as calls do
        row = _module(settings["part"]).measure(setting, settings["case"])
    return [{"status": "failed"} | row if row.get("ok") is False else row]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Failures, targets, parts, skipped cases, and figures furthest from their floors. They have at most 60 lines,
    because only the end of a long output may come back from a lent machine."""
    failed, skipped, parts = [], dict[tuple[str, str], list[Row]](), dict[str, list[Row]]()
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
        if row["status"] == "failed":
            failed.append((_name(row), _short(row["why"])))
        elif row["status"] != "ok":
            skipped.setdefault((row["part"], _short(row["why"])), []).append(row)
    skips = [
        (_name(own[0]) if len(own) == 1 else f"{part}: {len(own)} cases", why) for (part, why), own in skipped.items()
    ]
    slow = sorted(
        ((over, _name(row, kind), took) for row in rows for kind, over, took in over_floors(row)), reverse=True
    )
    counts = [
        [part, f"{sum(row['took_s'] for row in own):.1f}"]
        + [sum(row["status"] == status for row in own) or None for status in STATUSES]
        for part, own in parts.items()
    ]
    furthest = [(case, f"{over:,.2f}", took) for over, case, took in slow[:_MOST_SLOW]]
    made = {
        "gpu_failed": (("failed", "why"), _cut(failed, _MOST_FAILED)),
        "gpu_targets": (("target", "limit", "verdict", "worst"), [_target(target, rows) for target in TARGETS]),
        "gpu_parts": (("part", "seconds", *STATUSES), counts),
        "gpu_skipped": (("skipped", "why"), _cut(skips, _MOST_SKIPPED)),
        "gpu_slow": (("furthest from its floor", "times", "took"), furthest),
    }
    return {mark: markdown_table(columns, lines) for mark, (columns, lines) in made.items() if lines}


def read(target: Target, rows: Sequence[Row]) -> Reading:
    """The worst figure of `target` in `rows`. The target is met only if every row of its cases is within the limit."""
    own = [row for row in rows if row["part"] == target.part and re.fullmatch(target.cases, row["case"])]
    values = {row["case"]: value for row in own if (value := _value(target, row)) is not None}
    if not values:
        return Reading(NOT_MEASURED, expected=len(own))
    case = (min if target.at_least else max)(values, key=lambda case: values[case])
    worst = values[case]
    met = worst >= target.limit if target.at_least else worst <= target.limit
    verdict = MISSED if not met else OK if len(values) == len(own) else NOT_MEASURED
    return Reading(verdict, worst, case, len(values), len(own))


def _value(target: Target, row: Row) -> float | None:
    try:
        return abs(float(reduce(lambda of, name: of[name], target.figure.split("."), row)))  # type: ignore[arg-type]
    except (LookupError, TypeError):
        return None


def over_floors(row: Row) -> Iterator[tuple[str, float, str]]:
    """Each kind of forward of a row, or "" for all that was measured, with its ratio to the floor and the median."""
    kinds = row.get("kinds")
    for kind, of in (kinds if isinstance(kinds, Mapping) else {"": row}).items():
        if isinstance(of, Mapping) and isinstance(of.get("over_floor"), int | float):
            unit = "ms" if "median_ms" in of else "us"
            yield kind, of["over_floor"], f"{of.get('median_ms', of.get('time_us', 0)):.4g} {unit}"


def _target(target: Target, rows: Sequence[Row]) -> list[str]:
    found = read(target, rows)
    few = f", {found.measured} of {found.expected} cases" if found.measured < found.expected else ""
    worst = "" if found.worst is None else f"{target.words.format(found.worst)} ({found.case}){few}"
    tiny = any(row.get("size") == "tiny" for row in rows)
    return [target.name, target.asked, NOT_MEASURED if tiny else found.verdict, _short(worst)]


def _module(part: str) -> Any:
    """A part, imported on demand: one that cannot be imported costs its own row alone."""
    return importlib.import_module(f"gpu_parts.{part}")


def _cut(lines: Sequence[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    left = len(lines) - most
    return [*lines[:most], *([("", f"and {left} more, see the file")] if left > 0 else [])]


def _name(row: Row, kind: str = "") -> str:
    return _short(f"{row['part']}: {row['case']} {kind}").rstrip(": ")


def _short(text: Any) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= _WIDEST else words[: _WIDEST - 1] + "…"
