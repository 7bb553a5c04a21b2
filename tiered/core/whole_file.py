"""Writes a file whole or not at all."""

from collections.abc import Callable
from pathlib import Path


def write_then_rename(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it, so that a reader never sees half of it."""
    part = path.with_name(f".{path.name}.part")
    write(part)
    part.chmod(0o644)  # safetensors makes files that only the owner can read
    part.replace(path)
