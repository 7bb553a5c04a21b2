"""The file of a GPU day, written anew with every row, so that whatever happens next loses none."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiered.core.whole_file import write_then_rename

STATUSES = ("ok", "failed", "wrong", "skipped")


class Results:
    """What was measured so far.

    Attributes:
        parts: by name: "seconds" that it took, None while it goes on, and its "rows", each with its "case".
        path: of the file; None: there is none yet.
        broken: why the file is not up to date; None where it is.
    """

    def __init__(self, head: dict[str, Any], complain: Callable[[str], object]) -> None:
        """`head`: what the rows rest on. `complain` is told, once, that the file cannot be written."""
        self._head, self._complain = head, complain
        self.path: Path | None = None
        self.parts: dict[str, dict[str, Any]] = {}
        self.broken: str | None = None

    def begin(self, part: str) -> None:
        """`part` begins."""
        self.parts[part] = {"seconds": None, "rows": []}
        self._write()

    def add(self, part: str, case: str, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the part that is under way, as the file has it."""
        row = {"case": case} | row
        self.parts[part]["rows"].append(row)
        self._write()
        return row

    def end(self, part: str, seconds: float) -> None:
        """`part` has ended."""
        self.parts[part]["seconds"] = round(seconds, 1)
        self._write()

    def update(self, head: dict[str, Any], path: Path | None = None) -> None:
        """More of the head, and where the file is from now on."""
        self._head |= head
        self.path = self.path or path
        self._write()

    def as_dict(self) -> dict[str, Any]:
        """What the file holds."""
        return self._head | {"parts": self.parts}

    def _write(self) -> None:
        if self.path is None:
            return
        try:
            write_then_rename(self.path, lambda part: part.write_text(self._text(), encoding="utf-8"))
        except OSError as error:
            if self.broken is None:
                self._complain(f"{self.path}: {error.strerror}; what is measured from now on may not be in it")
            self.broken = error.strerror
            with contextlib.suppress(OSError):
                self.path.with_name(f".{self.path.name}.part").unlink(missing_ok=True)
        else:
            self.broken = None

    def _text(self) -> str:
        # One row a line, so that a difference between two days can be read.
        parts = ",\n".join(
            f'  {json.dumps(name)}: {{"seconds": {json.dumps(part["seconds"])}, "rows": ['
            + ",".join(f"\n   {json.dumps(row)}" for row in part["rows"])
            + "\n  ]}"
            for name, part in self.parts.items()
        )
        return json.dumps(self._head | {"parts": {}}, indent=1).removesuffix("{}\n}") + f"{{\n{parts}\n }}\n}}\n"


def counts(parts: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """By part: how many rows are of each of `STATUSES`, those without any left out."""
    counted = {name: Counter(map(status, part["rows"])) for name, part in parts.items()}
    return {name: {each: count[each] for each in STATUSES if count[each]} for name, count in counted.items()}


def wrong(parts: Mapping[str, Any]) -> list[str]:
    """Part and case of every row that failed, or that found something wrong."""
    rows = [(name, row) for name, part in parts.items() for row in part["rows"]]
    return [f"{name}: {row['case']}".removesuffix(": ") for name, row in rows if status(row) in ("failed", "wrong")]


def status(row: Mapping[str, Any]) -> str:
    """One of `STATUSES`. A count of tests that failed or were skipped is a figure like any other."""
    for name in ("failed", "skipped"):
        if isinstance(row.get(name), str):
            return name
    return "wrong" if row.get("ok") is False else "ok"
