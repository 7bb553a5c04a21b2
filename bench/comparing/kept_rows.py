"""The rows of a comparison's file: those that are still good, and those that are measured now, round by round."""

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rows_file import measured_before, write_rows

from comparing.questions import Setting
from comparing.rounds import Row, joined, noise_floor, question_of, with_spread
from comparing.summary import is_long
from tiered.core.provenance import provenance

_NAMES = ("policy", "task", "size", "commit", "examples")
_FIGURES = {
    "correct": int,
    "exact_match": (int, float),
    "nfe": (int, float),
    "tokens_per_forward": (int, float),
    "tokens_per_second": (int, float),
    "rows_per_forward": (int, float),
    "cache_ratio": (int, float),
    "passes": dict,
    "device_bytes": int,
    "host_bytes": int,
    "moved_bytes": dict,
}


class Rows:
    """See the module."""

    def __init__(
        self,
        path: Path | None,
        basis: dict[str, Any],
        planned: list[Setting],
        warn: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`path` None: nothing is kept. `planned`: all rows that may be there, in order. `basis`: what they rest on,
        beside their variants. `warn` hears of rows that are damaged; they are measured again.

        Raises:
            ValueError: `path` is no file of rows.
        """
        self._path, self._planned = path, planned
        self._head = basis | provenance()
        self._session = datetime.now(UTC).isoformat()
        self._references = {setting.variant.name: setting.variant.reference for setting in planned}
        # As JSON gives them back: lists for tuples.
        by_name = {setting.variant.name: setting.variant.as_dict() for setting in planned}
        self._variants = json.loads(json.dumps(by_name))
        saved: dict[str, Any] = {"rows": []} if path is None else measured_before(path, basis)
        damaged = [number for number, row in enumerate(saved["rows"], start=1) if not is_sound(row)]
        if damaged:
            warn(f"{path}: rows {', '.join(map(str, damaged))} are damaged and will be measured again")
        known = saved.get("variants", {})
        same = {name for name, variant in self._variants.items() if known.get(name) == variant}
        self._rows = {self._key(row): row for row in saved["rows"] if is_sound(row) and row["policy"] in same}
        self._asked: set[tuple[Any, ...]] = set()  # rows of this session that got no figures

    def forget(self, names: Iterable[str]) -> None:
        """Drop what is known of these variants."""
        gone = set(names)
        self._rows = {key: row for key, row in self._rows.items() if row["policy"] not in gone}

    def lacks(self, setting: Setting, number: int, rounds: int) -> bool:
        """Whether round `number` of `rounds` has still to measure `setting`. A row that says why it was not measured
        may have other news next time, but not in the same session; one from before there were rounds is good for one
        round, and makes room where more are asked for."""
        key = self._key(setting.as_dict())
        row = self._rows.get(key)
        if key in self._asked:
            return False
        if row is None or "why" in row:
            return True
        return rounds > 1 if "samples" not in row else len(row["samples"]) <= number

    def add(self, row: Row, number: int) -> Row:
        """Keep what round `number` has measured, with the revision that it is of, and write the file; returns the row
        as it stands there. Raises `OtherAnswersError` as `joined`."""
        key = self._key(row)
        row = row | {"revision": self._head["revision"]}
        if "why" in row:
            self._asked.add(key)
            self._rows[key] = row
        else:
            before = self._rows.get(key)
            self._rows[key] = joined(None if before is None or "why" in before else before, row, self._session, number)
        rows = self.in_order()
        if self._path is not None:
            floor = {"noise_floor": noise_floor(rows, is_long)}
            write_rows(self._path, self._head | {"variants": self._variants} | floor, rows)
        return next(each for each in rows if self._key(each) == key)

    def in_order(self) -> list[Row]:
        """Those that are there, in the order of the plan, with what their rounds say."""
        keys = [self._key(setting.as_dict()) for setting in self._planned]
        rows = [self._rows[key] for key in keys if key in self._rows]
        return [with_spread(row, self._reference(row)) for row in rows]

    def _reference(self, row: Row) -> Row | None:
        """The row of `none` that `row`'s speed is held against; None for that row itself."""
        name = self._references[row["policy"]]
        return None if name == row["policy"] else self._rows.get((name, *question_of(row)))

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in _NAMES)


def is_sound(row: object) -> bool:
    """Whether `row` is one of a comparison: names, and either why there are no figures or figures that can be."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("policy", "task", "commit")):
        return False
    if not isinstance(row.get("examples"), int) or not isinstance(row.get("size"), int | None) or "size" not in row:
        return False
    if "why" in row:
        return isinstance(row["why"], str)
    if not all(isinstance(row.get(name), kind) for name, kind in _FIGURES.items()):
        return False
    return (
        0 <= row["correct"] <= row["examples"]
        and 0 <= row["exact_match"] <= 1
        and row["tokens_per_second"] >= 0
        and row["nfe"] > 0
        and min(row["device_bytes"], row["host_bytes"]) >= 0
        and isinstance(row.get("samples", []), list)
        and all(map(_is_sample, row.get("samples", [])))
    )


def _is_sample(sample: object) -> bool:
    kinds = {"session": str, "round": int, "tokens_per_second": (int, float)}
    return (
        isinstance(sample, dict)
        and all(isinstance(sample.get(name), kind) for name, kind in kinds.items())
        and sample["tokens_per_second"] >= 0
    )
