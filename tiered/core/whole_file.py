"""Writes a file whole or not at all, and says before the work for it if it cannot be written."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def check_new_file(option: str, path: Path) -> None:
    """Raises `FileNotFoundError`, `IsADirectoryError` or `FileExistsError` if no new file can be made at `path`, the
    value of `option`."""
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder; the name of a file is allowed")
    if os.path.lexists(path):
        raise FileExistsError(f"{option} {path} exists; the name of a new file is allowed")


def write_then_rename(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it, so that a reader never sees half of it. An `OSError` names
    `path`, and no error leaves the other file behind."""
    part = path.with_name(f".{secrets.token_hex(8)}.part")  # short, and no file of another's
    try:
        with part.open("x") as made:
            mode = os.fstat(made.fileno()).st_mode
        try:
            write(part)
            part.chmod(mode)  # safetensors makes a file of its own, which only the owner can read
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
