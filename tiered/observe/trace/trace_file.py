"""Where a trace goes: JSON, or JSON under gzip."""

import gzip
import json
from pathlib import Path
from typing import Any

from tiered.core.whole_file import write_then_rename

SUFFIXES = (".json", ".json.gz")


def check_trace_path(path: Path) -> None:
    """Raise where no trace can be written, before any work is done for it.

    Raises:
        ValueError: a name that Perfetto would not know for a trace.
        FileNotFoundError, IsADirectoryError: there is no such folder, or it is one.
    """
    if not path.name.endswith(SUFFIXES) or path.name in SUFFIXES:
        raise ValueError(f"a trace is a file named *.json or *.json.gz, not {str(path)!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no directory {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write `trace` as a whole or not at all, compressed where the name ends in .gz. Errors as `check_trace_path`."""
    check_trace_path(path)
    text = json.dumps(trace, allow_nan=False, separators=(",", ":")).encode()
    zipped = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    write_then_rename(path, lambda part: part.write_bytes(zipped))
