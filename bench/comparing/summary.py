"""The rows of bench/compare.py by policy: as JSON, and as a table on the screen."""

from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Table

from tiered.core.byte_size import format_bytes
from tiered.embedded import tasks

Row = dict[str, Any]

# Task and tokens of the prompt. The speed, rows and bytes of these lookups, which come one by one, stand in the tables:
# 1024 columns with the answer, long enough that a step's rows are what it costs.
LONG = ("lookup", 992)
LONG_NAME = "lookup 992"
# What rows of several rounds have, and those of baselines.
OF_SOME = ("low", "high", "rounds", "speedup", "speedup_low", "speedup_high", "bytes")


def by_policy(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """By policy and commit rule: exact match by task, NFE and TPF of an example on average, and the figures of the long
    lookup; "why" where there are none."""
    return {
        policy: {commit: summary(theirs) for commit, theirs in grouped(own, "commit").items()}
        for policy, own in grouped(rows, "policy").items()
    }


def summary(rows: list[Row]) -> dict[str, Any]:
    """Rows of one policy under one commit rule as one."""
    measured = [row for row in rows if "why" not in row]
    if not measured:
        return {"why": rows[0]["why"]} if rows else {}
    examples = sum(row["examples"] for row in measured)
    means = {
        name: round(sum(row[name] * row["examples"] for row in measured) / examples, 3)
        for name in ("nfe", "tokens_per_forward")
    }
    matches = {LONG_NAME if is_long(row) else row["task"]: row["exact_match"] for row in measured}
    figures = {}
    for row in filter(is_long, measured):
        names = ("tokens_per_second", "rows_per_forward", "cache_ratio", "device_bytes", "host_bytes")
        figures = {name: row[name] for name in names} | {name: row[name] for name in OF_SOME if name in row}
        figures["moved_bytes_per_forward"] = round(sum(row["moved_bytes"].values()) / sum(row["passes"].values()))
    return {"exact_match": matches} | means | figures


def is_long(row: Row) -> bool:
    """Whether a row is of the long lookup."""
    return (row["task"], row["size"]) == LONG


def grouped(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    """Rows by their `name`, in the order in which each first comes."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def screen_table(rows: Iterable[Row], commit: str) -> Table:
    """All policies under one commit rule, for a terminal."""
    names = [*tasks.TASKS, LONG_NAME]
    grid = Table(title=f"{commit}: right answers in per cent; tokens/s and what follows of {LONG_NAME}")
    by_name = by_policy(rows)
    columns = MEANS | shown_figures(commits.get(commit, {}) for commits in by_name.values())
    for column in ("policy", *names, *columns):
        grid.add_column(column, justify="left" if column == "policy" else "right", overflow="fold")
    for policy, commits in by_name.items():
        figures = commits.get(commit, {})
        shares = [percent(figures.get("exact_match", {}).get(name)) for name in names]
        grid.add_row(policy, *shares, *(show(figures) for show in columns.values()))
    return grid


def shown_figures(summaries: Iterable[dict[str, Any]]) -> dict[str, Callable[[dict[str, Any]], str]]:
    """The columns of `FIGURES` that any of `summaries` has something for."""
    summaries = list(summaries)
    return {name: show for name, show in FIGURES.items() if any(show(figures) != "-" for figures in summaries)}


def percent(share: float | None) -> str:
    """Three digits of a share; None: "-"."""
    return "-" if share is None else f"{100 * share:.3g}"


def number(name: str, digits: int) -> Callable[[dict[str, Any]], str]:
    """What shows the figure `name`, where it is there."""
    return lambda figures: "-" if figures.get(name) is None else f"{figures[name]:.{digits}f}"


def _bytes(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda figures: "-" if figures.get(name) is None else format_bytes(figures[name]) if figures[name] else "0"


def _held(figures: dict[str, Any]) -> str:
    """Bytes of the device; what was counted leaves activations out, so it is a bound from below."""
    return f"{'≥ ' if figures.get('bytes') == 'counted' else ''}{_bytes('device_bytes')(figures)}"


def _speedup(figures: dict[str, Any]) -> str:
    """The ratio to `none` in the same call; with more than one round, its 20th to 80th percentile."""
    if "speedup" not in figures:
        return "-"
    spread = f" ({figures['speedup_low']:.2f}–{figures['speedup_high']:.2f})" if figures["rounds"] > 1 else ""  # noqa: RUF001
    return f"{figures['speedup']:.2f}{spread}"


# Columns: what each shows of a summary.
MEANS = {"NFE": number("nfe", 2), "TPF": number("tokens_per_forward", 2)}
FIGURES = {
    "tokens/s": number("tokens_per_second", 1),
    "over `none`": _speedup,
    "rows a step": number("rows_per_forward", 1),
    "from cache": number("cache_ratio", 3),
    "device": _held,
    "host": _bytes("host_bytes"),
    "moved a step": _bytes("moved_bytes_per_forward"),
}
