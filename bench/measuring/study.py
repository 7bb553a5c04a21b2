"""The studies there are, and what each of their modules has.

A study is a module of bench/studies. Its docstring says, in its first line, what it measures. It has

    AXES        by name, the values that are measured; each is a flag of the command line. "threads" as an axis is in
                place of the flag that all other studies have, and a setting of every point
    QUICK       those of `--quick`, where they are others
    OF          columns that tell the rows of one point apart
    TIMED       columns that a clock gives; in all others two runs of a point agree, or `statistics.merged` says so
    points(axes)                settings of every point, in the order in which a round measures them: what is compared
                                stands together, so that a slow spell of the machine hits all of it. `ValueError` for
                                values that are none
    measure(settings, **local)  the rows of a point, in a process of its own; `RefusedError` where the library says no
    tables(rows)                what is read from the rows of all runs: Markdown, by the mark of a page that it fills

and it may have

    local(axes, **flags)        what only this machine knows, such as where a model is, as keywords of `measure`
    last_line(rows)             numbers of all rows by name, for the last line of stdout
    expected(settings)          seconds that a point will take, where none of its runs was measured
    LOCAL       flags whose values `local` gets, by name with their help: paths, None where they are not given. Neither
                a row nor the recorded command has them
"""

import ast
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring.point import Point
from tiered.core.checks import unknown_name

FOLDER = Path(__file__).resolve().parents[1] / "studies"
Axes = dict[str, list[Any]]


def names() -> dict[str, str]:
    """All studies, with the first lines of their docstrings. Imports none of them."""
    paths = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
    docs = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in paths}
    return {name: doc.partition("\n")[0] for name, doc in docs.items()}


def study_named(name: str) -> ModuleType:
    """Raises `ValueError` with the nearest name where there is none such."""
    if name not in names():
        raise unknown_name("study", name, names())
    return importlib.import_module(f"studies.{name}")


def points_of(study: ModuleType, axes: Axes, common: Mapping[str, Any], filters: str | None = None) -> list[Point]:
    """Every point once, in the order of the study; `common`: settings of all of them. `filters`: AXIS=VALUE|…,…, with
    != for what is left out; a point without such a setting has the value none.

    Raises:
        ValueError: what the study says, or a filter of no setting, or nothing left.
    """
    name = study.__name__.rpartition(".")[2]
    made = [Point(study=name, settings=dict(common) | settings) for settings in study.points(axes)]
    points = list({point.key: point for point in made}.values())
    settings = dict.fromkeys(name for point in points for name in point.settings)
    for condition in (filters or "").split(",") if filters else ():
        axis, equals, wanted = condition.partition("=")
        leave_out, axis = axis.endswith("!"), axis.rstrip("!").strip()
        if not equals or axis not in settings:
            raise ValueError(f"--filter {condition!r}; NAME=VALUE|… is allowed, with a name of {', '.join(settings)}")
        values = {value.strip() for value in wanted.split("|")}
        points = [point for point in points if (_text(point.settings.get(axis)) in values) is not leave_out]
    if not points:
        raise ValueError("no point is left to measure")
    return points


def parse_values(name: str, text: str, like: Sequence[Any]) -> list[Any]:
    """The values in a comma-separated list, each once: numbers where those in `like` are; `none` is None where no value
    in `like` is text.

    Raises:
        ValueError: names the axis, the value and what is allowed.
    """
    kinds = {type(value) for value in like} - {type(None)}
    return list(dict.fromkeys(_value(name, each.strip(), kinds) for each in text.split(",")))


def _value(name: str, text: str, kinds: set[type]) -> Any:
    if text.lower() == "none" and str not in kinds:
        return None
    for kind in (int, float):
        if kind in kinds or (kind is int and float in kinds):
            try:
                return kind(text)
            except ValueError:
                continue
    if text and (str in kinds or not kinds):
        return text
    raise ValueError(f"{name} = {text!r}; allowed: {' or '.join(sorted(kind.__name__ for kind in kinds))}, or none")


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
