"""Writes a file whole or not at all, and says before the work for it if it cannot be written."""

from collections.abc import Callable
from pathlib import Path


def check_new_file(option: str, path: Path) -> None:
    """Raises `FileNotFoundError` or `IsADirectoryError` if no file can be written at `path`, the value of `option`."""
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder; the name of a file is allowed")


def write_then_rename(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it, so that a reader never sees half of it."""
    part = path.with_name(f".{path.name}.part")
    write(part)
    part.chmod(0o644)  # safetensors makes files that only the owner can read
    part.replace(path)
