"""Writes files all together: each whole, and none where one has no room."""

from collections.abc import Mapping
from pathlib import Path


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put `files` into `folder`: all are written beside their places before the first gets its name.

    Raises:
        OSError: a folder or file cannot be written; nothing of this call is left, and what was there before stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: folder / f".{name}.part" for name in files}
    try:
        for name, part in parts.items():
            part.write_bytes(files[name])
        for name, part in parts.items():
            part.replace(folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
