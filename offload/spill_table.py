"""The table beside a spill file: which record lies where. Replaced as a whole, so a reader sees the old or the new one.

It is also what tells a spill file from a file of someone else: only a file with a table is ever written over.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered.offload.errors import CorruptRecordError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Offset in the file, bytes of the payload, version."""

    offset: int
    nbytes: int
    version: int


@dataclass(frozen=True, slots=True)
class SpillTable:
    """The shape of the file, and its records by name."""

    slab_bytes: int
    slabs: int
    records: dict[str, TableEntry]

    def save(self, path: Path) -> None:
        """Write beside `path`, then give it the name; on the disk when this returns."""
        content = {
            "format": FORMAT,
            "slab_bytes": self.slab_bytes,
            "slabs": self.slabs,
            "records": {name: [entry.offset, entry.nbytes, entry.version] for name, entry in self.records.items()},
        }
        part = part_path(path)
        with part.open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @classmethod
    def load(cls, path: Path) -> "SpillTable":
        """The table at `path`.

        Raises:
            CorruptRecordError: it is not a table of this format.
            FileNotFoundError: there is none.
        """
        try:
            content: Any = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}, not {FORMAT}")
            records = {name: TableEntry(*map(_integer, entry)) for name, entry in content["records"].items()}
            return cls(_integer(content["slab_bytes"]), _integer(content["slabs"]), records)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptRecordError(f"{path} is no table of a spill file: {error!r}") from error


def table_path(path: Path) -> Path:
    """Where the table of the spill file at `path` is."""
    return path.with_name(f"{path.name}.table")


def part_path(path: Path) -> Path:
    """Where the table at `path` is written before it gets its name."""
    return path.with_name(f"{path.name}.part")


def _integer(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
