"""Rows as text: settings in words, panels of rows that are alike, points over all their tasks, figures with units."""

from collections.abc import Iterable, Sequence
from typing import Any

from tiered.core.byte_size import format_bytes

Row = dict[str, Any]
WORDS = {
    "clusters": "C",
    "top_m": "M",
    "update_threshold": "T",
    "confidence": "threshold",
}
BARE = ("policy", "call", "model", "study", "task", "tier", "codec", "rule", "noise")  # their values need no name
UNITS = {"GiB": 30, "MiB": 20, "KiB": 10, "B": 0}
NONE = {"confidence": "one token a step", "threshold": "one token a step", "budget": "no budget"}


def words(row: Row, names: Iterable[str]) -> str:
    """Settings of a row: `context 512, no budget`."""
    told = []
    for name in names:
        if row.get(name) is not None:
            word = "" if name in BARE else WORDS.get(name, name).replace("_", " ")
            told.append(f"{word} {shown(name, row[name])}".strip())
        elif name in NONE and "rule" not in row:
            told.append(NONE[name])
    return ", ".join(told)


def panels(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """The rows by the settings of `names` in which they differ, in words, sorted by these settings."""
    differ = [name for name in names if len({str(row.get(name)) for row in rows}) > 1]
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: [in_order(row.get(name)) for name in differ]):
        found.setdefault(words(row, differ), []).append(row)
    return found


def in_order(value: Any) -> tuple[int, float, str]:
    """A key for sorting: None comes first, then numbers, then words."""
    return (1, float(value), "") if isinstance(value, int | float) else (0 if value is None else 2, 0.0, str(value))


def good(rows: Iterable[Row]) -> list[Row]:
    """Rows with figures."""
    return [row for row in rows if row["status"] == "ok"]


def points(rows: Sequence[Row], *, longest: bool = False) -> list[Row]:
    """A row for each point, over all its tasks: the sum of right answers, the most bytes, and tokens a second.
    `longest` leaves speeds of shorter prompts out. If a task was refused or failed, its row is the point's."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["point"], []).append(row)
    out = []
    for own in found.values():
        if bad := [row for row in own if row["status"] != "ok"]:
            out.append(bad[0])
            continue
        sums = {name: sum(row[name] for row in own) for name in ("correct", "examples")}
        size = max(row.get("size", 0) for row in own)
        timed = [row for row in own if row.get("size", 0) == size or not longest]
        seconds = [row["seconds"] for row in timed]
        speed = sum(row["tokens_per_second"] * each for row, each in zip(timed, seconds, strict=True)) / sum(seconds)
        most = {name: max(row[name] for row in own) for name in ("device_bytes", "host_bytes")}
        shares = {"accuracy": sums["correct"] / sums["examples"], "tokens_per_second": speed}
        out.append(own[0] | sums | most | shares)
    return out


def shown(name: str, value: Any) -> str:
    """A value of the column `name`: three digits, bytes in a binary unit, shares in per cent."""
    if value is None or isinstance(value, bool | str):
        return ("yes" if value else "") if isinstance(value, bool) else value or ""
    if name.endswith("bytes") or (name == "budget" and value > 1):  # up to 1 it is a share
        return format_bytes(int(value))
    if name == "link":
        return f"{value:g} MB/s"
    if name.endswith(("share", "accuracy", "covered")):
        return f"{100 * value:.1f} %"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:.0f}"


def byte_unit(most: float) -> tuple[str, int]:
    """The binary unit for figures of up to `most` bytes, and its bytes."""
    return next((unit, 2**power) for unit, power in UNITS.items() if most >= 2**power or not power)
