"""The folder of a study: a small file for every measurement as soon as there is one, and the table made of them.

    points/KEY-RUN.json   one run of one point; gone once the table has it
    rows.parquet          the table, and in its metadata the machines, versions and revisions of its rows

A file is whole or absent. A table of another study, or of other weights, is moved aside and not mixed.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring.point import Job, Point
from measuring.table import Row, read_table, write_table
from tiered.core.whole_file import write_then_rename

TABLE, POINTS = "rows.parquet", "points"
WEIGHTS = "weights_sha256"
# Settings that rows of a table must share to be compared; weights are shared by the rows of a model.
BASIS = (WEIGHTS, "device", "threads", "seed")


class Store:
    """The measurements of a study in `folder`.

    Attributes:
        unfinished: rows by `Job.name`, from a run that has not ended yet.
        finished: rows of the table, by `Job.name`.
        stamps: origins of rows (`provenance`), by id.
        skipped: names of files that are not used, and why.
    """

    def __init__(self, folder: Path, points: Sequence[Point]) -> None:
        """`points`: points that are asked for."""
        self.folder, self._points = folder, {point.key: point for point in points}
        self._study = points[0].study
        self.unfinished: dict[tuple[str, int], list[Row]] = {}
        self.finished: dict[tuple[str, int], list[Row]] = {}
        self.stamps: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self._read()

    def add(self, job: Job, rows: Sequence[Row], seconds: float, made_on: Mapping[str, Any]) -> list[Row]:
        """Keep new `rows`, with the settings of their point as columns. Returns the rows with these columns."""
        stamp = hashlib.sha256(json.dumps(made_on, sort_keys=True).encode()).hexdigest()[:8]
        self.stamps[stamp] = dict(made_on)
        head = {"point": job.point.key, "run": job.run, "stamp": stamp, "took_s": round(seconds, 3)}
        flat = []
        for row in rows:
            clash = row.keys() & (head.keys() | job.point.settings.keys())
            assert not clash, f"{sorted(clash)}: names of settings, or of every row"
            flat.append(head | dict(job.point.settings) | row)
        self.unfinished[job.name] = flat
        saved = {"study": self._study, "stamps": {stamp: self.stamps[stamp]}, "rows": flat}
        text = json.dumps(saved, indent=1) + "\n"
        write_then_rename(self._file(job.name), lambda part: part.write_text(text, encoding="utf-8"))
        return flat

    def merge(self, command: str) -> Sequence[Row]:
        """Write the table, in which unfinished rows replace rows of the same jobs. Returns its rows."""
        rows = [row for own in (self.finished | self.unfinished).values() for row in own]
        order = {key: number for number, key in enumerate(self._points)}
        rows.sort(key=lambda row: (row["run"], order.get(row["point"], len(order))))
        stamps = {row["stamp"]: self.stamps[row["stamp"]] for row in rows}
        about = {"study": self._study, "command": command, "stamps": stamps}
        table = self.folder / TABLE
        if TABLE in self.skipped and table.exists():
            number = next(n for n in range(1, 1000) if not (self.folder / f"rows.{n}.parquet").exists())
            table.replace(self.folder / f"rows.{number}.parquet")
        write_then_rename(table, lambda part: write_table(part, rows, about))
        for name in self.unfinished:
            self._file(name).unlink(missing_ok=True)
        self.finished |= self.unfinished
        self.unfinished.clear()
        return rows

    def _file(self, name: tuple[str, int]) -> Path:
        return self.folder / POINTS / f"{name[0]}-{name[1]}.json"

    def _read(self) -> None:
        try:
            rows, about = read_table(self.folder / TABLE)
            self._take(rows, about, self.finished)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError) as error:
            self.skipped[TABLE] = str(error)
        for path in sorted((self.folder / POINTS).glob("*.json")):
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))
                self._take(saved["rows"], saved, self.unfinished)
            except (ValueError, KeyError, TypeError, OSError) as error:
                self.skipped[f"{POINTS}/{path.name}"] = f"no measurement of this study: {error}"

    def _take(self, rows: list[Row], about: Mapping[str, Any], into: dict[tuple[str, int], list[Row]]) -> None:
        """Raises `ValueError` if `rows` are of another study, or differ from the points in a setting of `BASIS`."""
        if about["study"] != self._study:
            raise ValueError(f"of the study {about['study']!r}, not {self._study!r}")
        for name in BASIS:
            asked: dict[object, list[object]] = {}
            for point in self._points.values():
                if name in point.settings:
                    model = point.settings.get("model") if name == WEIGHTS else None
                    asked.setdefault(model, []).append(point.settings[name])
            for row in rows:
                of_model = asked.get(row.get("model") if name == WEIGHTS else None, [])
                if name in row and of_model and row[name] not in of_model:
                    raise ValueError(f"of {name} {row[name]}, where {of_model[0]} is asked for")
        for row in rows:
            into.setdefault((row["point"], row["run"]), []).append(row)
        self.stamps |= about["stamps"]


def read_rows(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a folder's table, and its metadata. Raises as `read_table`."""
    return read_table(folder / TABLE)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and lock it for one run. The lock ends with its process.

    Raises:
        ValueError: another run has it, or it cannot be made.
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
            raise ValueError(f"{folder} is in use by another run; wait for it, or choose another --out") from error
        for part in (*folder.glob(".*.part"), *points.glob(".*.part")):
            part.unlink()  # of a run that was killed
        yield
    finally:
        os.close(descriptor)
