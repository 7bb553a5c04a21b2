"""A row of a GPU day in a few words: the one figure that matters, or what was wrong."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from gpu_parts.results import status

# What stands for a row, the first that it has; {} is its value.
_FIGURES = (
    ("over_floor", "{:.2f}x its floor"),
    ("over_peak", "{:.1%} of the peak"),
    ("gb_per_s", "{:.1f} GB/s"),
    ("longest_context", "{:,} positions planned"),
    ("ran_at", "{:,} positions ran"),
    ("rel_error", "error {:.1e}"),
    ("passed", "{} passed"),
    ("errors", "{} errors"),
    ("median_ms", "{:.3f} ms"),
    ("total_ms", "{:.1f} ms"),
    ("name", "{}"),
)


def line_of(part: str, row: Mapping[str, Any]) -> str:
    """One line: part, case, how it went, the figure or the reason."""
    words = reason(row) if status(row) != "ok" else figure(row)
    seconds = f" ({row['took_s']:.1f} s)" if "took_s" in row else ""
    return " ".join(f"{part}: {row['case']}: {status(row)}{seconds}{'; ' if words else ''}{words}".split())


def reason(row: Mapping[str, Any]) -> str:
    """Why there is no figure, or what is wrong."""
    return " ".join(str(row.get({"wrong": "why"}.get(status(row), status(row)), "no reason given")).split())


def figure(row: Mapping[str, Any]) -> str:
    """The figure that says most; of a call, that of every kind of its forwards. Empty where there is none."""
    kinds = [f"{kind} {took(times)} = {over:.2f}x its floor" for kind, over, times in over_floors(row) if kind]
    if kinds:
        return ", ".join(kinds)
    for name, words in _FIGURES:
        if row.get(name) is not None:
            with suppress(ValueError, TypeError):  # another kind of value under this name
                return words.format(row[name])
    return ""


def over_floors(row: Mapping[str, Any]) -> Iterator[tuple[str, float, Mapping[str, Any]]]:
    """Each kind of forward of a row, or "" for all that was measured, with its ratio to the floor and its figures."""
    kinds = row.get("kinds")
    for kind, times in (kinds if isinstance(kinds, Mapping) else {"": row}).items():
        over = times.get("over_floor") if isinstance(times, Mapping) else None
        if isinstance(over, int | float):
            yield kind, over, times


def took(times: Mapping[str, Any]) -> str:
    """The median, in the unit that there is; empty where there is none."""
    for unit, median in (("ms", "median_ms"), ("us", "time_us")):
        if isinstance(times.get(median), int | float):
            return f"{times[median]:.4g} {unit}"
    return ""
