"""Reads the JSON files of the report; whatever is no row stays out, and is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reporting import schemas
from reporting.fields import Field, row_problem
from reporting.skips import Source, shown_name


def read_json(path: Path | None, name: str, rows: str, check: Callable[[Source, list[Any]], list[Any]]) -> Source:
    """A file with its rows under `rows`; `check` returns those that are good and notes the others.

    Nothing is raised for what the file holds: a file that cannot be used is a gap. `path` None: not given.
    """
    source = Source(file=name if path is None else shown_name(path))
    head = None if path is None else _parsed(path, source)
    if path is None or not path.exists():
        source.gap = f"{source.file} was not given"
    elif head is not None and not isinstance(head.get(rows), list):
        source.skip("", f"has no list of {rows}")
    elif head is not None:
        source.rows = check(source, head.pop(rows))
        source.head = head
    if source.gap is None and not source.rows:
        source.gap = f"{source.file} has nothing that can be shown"
    return source


def _parsed(path: Path, source: Source) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        source.skip("", f"cannot be read as JSON: {error.__class__.__name__}: {_without_path(error)}")
        return None
    if not isinstance(head, dict):
        source.skip("", "holds no JSON object")
        return None
    return head


def _without_path(error: Exception) -> str:
    return (error.strerror or "") if isinstance(error, OSError) else str(error)


def throughput_rows(source: Source, rows: list[Any]) -> list[Any]:
    """Rows with figures; a policy that did not fit its call is left out with its reason."""
    good = []
    for number, row in enumerate(rows):
        refused = isinstance(row, dict) and "why" in row
        fault = row_problem(row, schemas.THROUGHPUT_REFUSAL if refused else schemas.THROUGHPUT_ROW)
        if fault is None and refused:
            fault = f"{row['policy']} at {row['context']} tokens has no figures: {row['why']}"
        if fault is None:
            good.append(row)
        else:
            source.skip(f"row {number}", fault)
    return good


def memory_calls(source: Source, calls: list[Any]) -> list[Any]:
    """Calls with the samples, checks, layers and drifts that are good."""
    good = source.passing(calls, schemas.MEMORY_CALL, "call")
    for call in good:
        place = f"call {call['name']!r},"
        for name, fields in (("timeline", schemas.SAMPLE), ("checks", schemas.CHECK), ("drift", schemas.DRIFT)):
            call[name] = source.passing(call[name], fields, f"{place} {name}")
        call["layers"] = _layers(source, call["layers"], schemas.LAYER, place)
        samples = []
        for sample in call["timeline"]:
            fault = _tiers_problem(sample["tiers"])
            if fault is None:
                samples.append(sample)
            else:
                source.skip(f"{place} forward {sample['forward']}", fault)
        call["timeline"] = sorted(samples, key=lambda sample: sample["forward"])
    return good


def _tiers_problem(tiers: dict[str, Any]) -> str | None:
    for tier, accounts in tiers.items():
        if tier not in schemas.TIERS:
            return f"tier {tier!r} is none of {', '.join(schemas.TIERS)}"
        if fault := row_problem(accounts, dict.fromkeys(accounts, schemas.COUNT) if isinstance(accounts, dict) else {}):
            return f"in {tier}, {fault}"
    return None


def _layers(source: Source, layers: dict[str, Any], fields: dict[str, Field], place: str) -> dict[str, Any]:
    good = {}
    for name, layer in layers.items():
        fault = row_problem(layer, fields) if name.isdecimal() else "no layer's number"
        if fault is None:
            good[name] = layer
        else:
            source.skip(f"{place} layer {name}", fault)
    return dict(sorted(good.items(), key=lambda item: int(item[0])))


def ops_calls(source: Source, calls: list[Any]) -> list[Any]:
    """Calls with the operations that are good."""
    good = source.passing(calls, schemas.OPS_CALL, "call")
    for call in good:
        call["ops"] = source.passing(call["ops"], schemas.OP, f"call {call['name']!r}, operation")
    return good


def overlap_rows(source: Source, rows: list[Any]) -> list[Any]:
    """Rows with the layers that are good; an exposed time never exceeds its copy's."""
    good = source.passing(rows, schemas.OVERLAP_ROW, "row")
    for number, row in enumerate(good):
        row["layers"] = _layers(source, row["layers"], schemas.OVERLAP_LAYER, f"row {number},")
    return good


def compare_rows(source: Source, rows: list[Any]) -> list[Any]:
    """Rows with figures, and rows that say why there are none."""
    good = []
    for number, row in enumerate(rows):
        refused = isinstance(row, dict) and "why" in row
        fault = row_problem(row, schemas.COMPARE_REFUSAL if refused else schemas.COMPARE_ROW)
        if fault is None and not refused and row["correct"] > row["examples"]:
            fault = f"correct is {row['correct']} of {row['examples']} examples"
        if fault is None:
            good.append(row)
        else:
            source.skip(f"row {number}", fault)
    return good
