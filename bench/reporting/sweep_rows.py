"""Reads a sweep's folder: rows.parquet and run.json."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sweeping.rows import fault, read_parquet

from reporting.schemas import SETTINGS
from reporting.skips import Skip, Source, shown_name

SCHEMA = "tiered sweep 1"


def read_sweep(folder: Path) -> Source:
    """The rows of a sweep that can be shown. Nothing is raised for what the files hold."""
    path = folder / "rows.parquet"
    source = Source(file=shown_name(path))
    if not path.exists():
        source.gap = f"{source.file} is not there"
        return source
    source.head = _run(folder / "run.json", source)
    try:
        rows = read_parquet(path)
    except ValueError as error:
        source.skip("", str(error).replace(str(path), path.name)[:200])
        source.gap = f"{source.file} cannot be used"
        return source
    source.rows = _good(source, rows)
    if not source.rows:
        source.gap = f"{source.file} has no row that can be shown"
    return source


def _good(source: Source, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are rows, of one model, once each, and of points whose settings are the same in all of them."""
    model = _model(source, rows)
    seen: dict[tuple[Any, ...], int] = {}
    settings: dict[str, dict[str, Any]] = {}
    good = []
    for number, row in enumerate(rows):
        why = fault(row) or _options_fault(row["policy_options"])
        if why is None and row["model"] != model:
            why = f"foreign: model is {row['model']!r}, the sweep's is {model!r}"
        if why is None:
            key = (row["point"], row["run"], row["task"])
            own = {name: row[name] for name in SETTINGS}
            if key in seen:
                why = f"the same point, run and task as row {seen[key]}"
            elif settings.setdefault(row["point"], own) != own:
                why = f"point {row['point']} has other settings in an earlier row"
            seen.setdefault(key, number)
        if why is None:
            good.append(row)
        else:
            source.skip(f"row {number}", why)
    return good


def _options_fault(text: str) -> str | None:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    return None if isinstance(options, dict) else f"policy_options is {text!r}, no JSON object"


def _model(source: Source, rows: list[dict[str, Any]]) -> Any:
    """The one that run.json names, or else the one that most rows have."""
    place: Any = source.head
    for name in ("grid", "fixed", "model"):
        place = place.get(name) if isinstance(place, dict) else None
    if isinstance(place, str):
        return place
    return next(iter(Counter(row["model"] for row in rows).most_common(1)), (None,))[0]


def _run(path: Path, source: Source) -> dict[str, Any]:
    name, why = shown_name(path), None
    head: Any = None
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(head, dict) or head.get("schema") != SCHEMA:
            why = f"is not of the schema {SCHEMA!r}"
    except FileNotFoundError:
        why = "is not there: nothing says which command made the rows"
    except (OSError, ValueError, RecursionError) as error:
        why = f"cannot be read as JSON: {error.__class__.__name__}"
    if why is not None:
        source.skipped.append(Skip(file=name, place="", why=why))
        return {}
    # What the sweep itself left out when it gathered its rows.
    dropped = head.get("skipped")
    for item in dropped if isinstance(dropped, list) else ():
        if isinstance(item, dict):
            source.skipped.append(Skip(file=str(item.get("file")), place="", why=f"by the sweep: {item.get('why')}"))
    return head
