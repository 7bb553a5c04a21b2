"""The folder of a sweep: a small file for every measurement as soon as there is one, and the table made of them.

    points/KEY-RUN.json   one run of one point; may be dropped once the table is written
    rows.parquet          the table
    run.json              what the rows rest on, and what was skipped

A file is there as a whole or not at all. Whatever cannot be believed is skipped, listed, and measured again.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeping.measurement import Measurement, file_name, gathered, read_measurement
from sweeping.point import SCHEMA, Common, Point
from sweeping.rows import read_parquet, write_parquet
from tiered.core.whole_file import write_then_rename

TABLE, RUN, POINTS, ASIDE = "rows.parquet", "run.json", "points", "rows.skipped.parquet"
_ORDER = ("policy", "clusters", "top_m", "update_threshold", "codec", "context", "batch", "budget_bytes", "confidence")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file, or a row of the table, that is not used, and why."""

    file: str
    why: str


@dataclass(slots=True)
class Store:
    """What `folder` holds for a sweep with the settings `common`.

    Attributes:
        measurements: by point and run.
        skipped: what is there and not used.
        made_on: machines and versions that the rows of the table came from, each once.
    """

    folder: Path
    common: Common
    measurements: dict[tuple[str, int], Measurement] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    made_on: list[Mapping[str, Any]] = field(default_factory=list)
    _saved: Sequence[Mapping[str, Any]] | None = None  # rows of the table as it is on disk, if all of them are good
    _head: dict[str, Any] | None = None  # run.json likewise

    def read(self) -> None:
        """Take in what is there. Files of points count before the table's rows: they are younger."""
        self._head = self._read_run()
        self._read_table()
        for path in sorted((self.folder / POINTS).glob("*")):
            if path.name.startswith("."):
                continue
            try:
                own = read_measurement(path.read_text(encoding="utf-8"), path.name, self.common)
            except (ValueError, TypeError, OSError) as error:
                self._skip(f"{POINTS}/{path.name}", error)
            else:
                self._keep(own)

    def add(self, point: Point, measurement: Measurement) -> None:
        """Keep what was measured now."""
        path = self.folder / POINTS / file_name(measurement.key, measurement.run)
        text = measurement.text(point)
        _write(path, lambda part: part.write_text(text, encoding="utf-8"))
        self._keep(measurement)

    def merge(self, grid: Mapping[str, Any], made_by: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Write the table and run.json, unless they say the same already; returns the rows.

        `grid`: what was asked for; `made_by`: the provenance of this run.
        """
        rows = [row for each in sorted(self.measurements.values(), key=self._place) for row in each.rows]
        points = len({each.key for each in self.measurements.values()})
        counts = {"weights_sha256": self.common.weights_sha256, "points": points, "rows": len(rows)}
        skipped = [{"file": each.file, "why": each.why} for each in self.skipped]
        head = self._head or {}
        told = not skipped or head.get("skipped") == skipped
        if rows == self._saved and told and all(head.get(name) == value for name, value in counts.items()):
            return rows
        table = self.folder / TABLE
        if table.exists() and any(each.file.startswith(TABLE) for each in self.skipped):
            table.replace(self.folder / ASIDE)  # rows of another sweep are not ours to delete
        _write(table, lambda part: write_parquet(part, rows))
        head = {"schema": SCHEMA, "grid": grid, **counts, "made_on": self.made_on, "skipped": skipped}
        text = json.dumps(head | dict(made_by), indent=1) + "\n"
        _write(self.folder / RUN, lambda part: part.write_text(text, encoding="utf-8"))
        return rows

    def _keep(self, measurement: Measurement) -> None:
        self.measurements[measurement.key, measurement.run] = measurement
        if measurement.made_on is not None and measurement.made_on not in self.made_on:
            self.made_on.append(measurement.made_on)

    def _read_table(self) -> None:
        path = self.folder / TABLE
        if not path.exists():
            return
        try:
            rows = read_parquet(path)
        except ValueError as error:
            self._skip(TABLE, error)
            return
        measurements, left_out = gathered(rows, self.common)
        for number, why in left_out:
            self._skip(f"{TABLE} {number}", why)
        for measurement in measurements:
            self._keep(measurement)
        if measurements and self._head is not None:
            self.made_on = [each for each in self._head["made_on"] if isinstance(each, dict)]
        self._saved = None if left_out else rows

    def _read_run(self) -> dict[str, Any] | None:
        path = self.folder / RUN
        if not path.exists():
            return None
        try:
            head = json.loads(path.read_text(encoding="utf-8"))
            if head["schema"] != SCHEMA or not isinstance(head["made_on"], list):
                raise ValueError("not of a sweep")
        except (ValueError, KeyError, TypeError, OSError) as error:
            self._skip(RUN, f"no record of a sweep: {error}")
            return None
        return head

    def _skip(self, file: str, why: object) -> None:
        self.skipped.append(Skipped(file, str(why)))

    def _place(self, measurement: Measurement) -> tuple[Any, ...]:
        """Its place in the table, which hangs on its settings alone. None comes first."""
        row = measurement.rows[0]
        values = [(row[name] is not None, row[name] if row[name] is not None else 0) for name in _ORDER]
        return measurement.run, *values, row["policy_options"], measurement.key


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for one sweep at a time. The lock goes with its process, however that ends.

    Raises:
        ValueError: another sweep has it, or it cannot be made.
    """
    points = folder / POINTS
    try:
        points.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(points / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"{points} cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{folder} is in use by another sweep; wait for it, or choose another --out") from error
        for part in (*folder.glob(".*.part"), *points.glob(".*.part")):
            part.unlink()  # of a sweep that was killed
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """As `write_then_rename`, leaving nothing behind that would fill a full disk further. The error names the file."""
    try:
        write_then_rename(path, write)
    except OSError as error:
        path.with_name(f".{path.name}.part").unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
