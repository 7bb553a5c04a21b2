"""One run of one point, and the file that keeps it; what such a file must say to be believed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeping.point import Common, Point, key_of
from sweeping.rows import COLUMNS, fault

POINT_SCHEMA = "tiered sweep point 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All rows of one run of one point.

    Attributes:
        key, run: of which.
        rows: one for each task, in the order of the point's tasks.
        wall: seconds that it took, from the start of its process to the end; None where that is not known.
        made_on: machine and versions; None where they are not known one by one.
    """

    key: str
    run: int
    rows: Sequence[Mapping[str, Any]]
    wall: float | None = None
    made_on: Mapping[str, Any] | None = None

    @property
    def status(self) -> str:
        """The worst of its rows': "failed" (its process died), "refused" (the library said no), or "ok"."""
        statuses = {row["status"] for row in self.rows}
        return next(status for status in ("failed", "refused", "ok") if status in statuses)

    @property
    def failed(self) -> bool:
        """Whether it is worth another try."""
        return self.status == "failed"

    @property
    def seconds(self) -> float:
        """Wall seconds, or where those are not known the sum of its rows'."""
        return sum(row["seconds"] or 0.0 for row in self.rows) if self.wall is None else self.wall

    @classmethod
    def of(
        cls, point: Point, run: int, figures: Sequence[Mapping[str, Any]], wall: float, made_on: Mapping[str, Any]
    ) -> "Measurement":
        """What a worker gave: the columns `status`, `why`, `task` and the figures, for every task. Columns that are
        missing are null.

        Raises:
            ValueError: not one good row for every task.
        """
        empty: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS)
        head = point.columns() | {"run": run}
        if not isinstance(figures, Sequence) or not all(isinstance(each, Mapping) for each in figures):
            raise ValueError(f"no rows: {str(figures)[:80]}")
        rows = [empty | dict(each) | head for each in figures]
        check_rows(rows, point, run)
        order = list(point.common.tasks)
        rows.sort(key=lambda row: order.index(str(row["task"])))
        return cls(key=point.key, run=run, rows=rows, wall=wall, made_on=made_on)

    @classmethod
    def failure(cls, point: Point, run: int, why: str, wall: float, made_on: Mapping[str, Any]) -> "Measurement":
        """That of a process that died: no task has figures."""
        figures = [{"status": "failed", "why": why, "task": task} for task in point.common.tasks]
        return cls.of(point, run, figures, wall, made_on)

    def text(self, point: Point) -> str:
        """As the file that keeps it."""
        head = {"schema": POINT_SCHEMA, "settings": point.settings(), "run": self.run, "wall": self.wall}
        return json.dumps(head | {"made_on": self.made_on, "rows": self.rows}, indent=1) + "\n"


def read_measurement(text: str, name: str, common: Common) -> Measurement:
    """The measurement in the text of the file `name`.

    Raises:
        ValueError: why it is none of a sweep with these `common` settings.
    """
    try:
        saved = json.loads(text)
        settings, run, rows = saved["settings"], saved["run"], saved["rows"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("cut off, or no measurement of a sweep") from error
    if saved.get("schema") != POINT_SCHEMA or not isinstance(settings, dict) or type(run) is not int:
        raise ValueError("no measurement of a sweep")
    if name != file_name(key_of(settings), run):
        raise ValueError("its name is not that of its settings")
    for key, value in common.settings().items():
        if settings.get(key) != value:
            raise ValueError(f"of another sweep: {key} {settings.get(key)}, not {value}")
    if not isinstance(rows, list) or not rows:
        raise ValueError("without rows")
    if why := fault(rows[0]):
        raise ValueError(why)
    point = point_of(rows[0], common)
    check_rows(rows, point, run)
    if point.key != key_of(settings):
        raise ValueError("rows of other settings")
    wall, made_on = saved.get("wall"), saved.get("made_on")
    if not isinstance(wall, int | float) or not isinstance(made_on, dict):
        raise ValueError("without its machine")
    return Measurement(key=point.key, run=run, rows=rows, wall=wall, made_on=made_on)


def gathered(rows: Sequence[Mapping[str, Any]], common: Common) -> tuple[list[Measurement], list[tuple[str, str]]]:
    """The measurements that `rows` of a table make up, and of each row that is left out its number and why."""
    groups: dict[tuple[str, int], list[int]] = {}
    left_out: list[tuple[str, str]] = []
    for number, row in enumerate(rows):
        if why := fault(row):
            left_out.append((f"row {number}", why))
        else:
            groups.setdefault((row["point"], row["run"]), []).append(number)
    measurements = []
    for (key, run), numbers in groups.items():
        own = [rows[number] for number in numbers]
        try:
            check_rows(own, point_of(own[0], common), run)
        except (ValueError, TypeError) as error:
            left_out += [(f"row {number}", str(error)) for number in numbers]
        else:
            measurements.append(Measurement(key=key, run=run, rows=own))
    return measurements, left_out


def point_of(row: Mapping[str, Any], common: Common) -> Point:
    """The point that a row without a fault is of, if it is one of a sweep with these `common` settings.

    Raises:
        ValueError, TypeError: its options are none of its policy's.
    """
    try:
        options = json.loads(row["policy_options"])
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise ValueError(f"policy_options = {row['policy_options'][:80]!r}, no JSON object")
    names = ("policy", "context", "batch", "budget", "confidence")
    return Point(**{name: row[name] for name in names}, options=options, common=common)


def check_rows(rows: Sequence[Mapping[str, Any]], point: Point, run: int) -> None:
    """Raise `ValueError` with the reason unless `rows` are those of this run of `point`, one for each task."""
    head = point.columns() | {"run": run}
    for row in rows:
        if why := fault(row):
            raise ValueError(why)
        if row["model"] != head["model"]:
            raise ValueError(f"of the model {row['model']!r}, not {head['model']!r}")
        if row["point"] != head["point"]:
            raise ValueError("of other weights or settings: its columns do not hash to its point")
        for name, value in head.items():
            if row[name] != value:
                raise ValueError(f"{name} = {row[name]!r}, where its point has {value!r}")
    tasks, wanted = [row["task"] for row in rows], list(point.common.tasks)
    if sorted(tasks) != sorted(wanted):
        raise ValueError(f"rows of {', '.join(map(str, tasks)) or 'nothing'}, not of {', '.join(wanted)}")
    for row in rows:
        if row["status"] == "ok" and row["examples"] != point.common.tasks[row["task"]]:
            raise ValueError(f"{row['examples']} examples of {row['task']}, not {point.common.tasks[row['task']]}")


def file_name(key: str, run: int) -> str:
    """Of the file that keeps a run of a point."""
    return f"{key}-{run}.json"
