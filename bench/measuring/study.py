"""The studies, and the contents of their modules.

A study is a module of bench/studies. The first line of its docstring says what it measures. The module has

    AXES        measured values, by name; each name is a flag of the command line. "threads" as an axis replaces the
                flag that all other studies have, and is a setting of every point
    QUICK       values of `--quick`, by name, if they differ
    OF          columns that tell the rows of one point apart
    TIMED       columns that a clock gives; in all others two runs of a point agree, or `statistics.merged` raises
    points(axes)                settings of every point, in the order of a round. Points that are compared stand
                                together, so that a slow spell of the machine hits all of them. `ValueError` for wrong
                                values
    measure(settings, **local)  the rows of a point, in a process of its own; `RefusedError` if the library refuses it
    tables(rows)                Markdown tables of the rows of all runs, by the mark of a page that each fills

and it may have

    local(axes, **flags)        keywords of `measure` that only this machine knows, such as the path of a model
    last_line(rows)             numbers of all rows by name, for the last line of stdout
    expected(settings)          seconds that a point will take, if none of its runs was measured
    LOCAL       flags whose values `local` gets, by name with their help: paths, None if they are absent. Neither a row
                nor the recorded command has them
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
    """The module of a study. Raises `ValueError` with the nearest name if there is none."""
    if name not in names():
        raise unknown_name("study", name, names())
    return importlib.import_module(f"studies.{name}")


def points_of(study: ModuleType, axes: Axes, common: Mapping[str, Any], filters: str | None = None) -> list[Point]:
    """Every point once, in the order of the study. `common`: settings of all points. `filters`: AXIS=VALUE|…,…, with !=
    to leave values out; a point without such a setting has the value none.

    Raises:
        ValueError: values that the study refuses, a filter of no setting, or no point left.
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
    """The values in a comma-separated list, each once: numbers if those in `like` are numbers. `none` is None if no
    value in `like` is text.

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
