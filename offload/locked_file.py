"""A file that one user at a time holds, among all processes."""

import fcntl
import os
from pathlib import Path


def open_locked(path: Path, *, create: bool) -> int:
    """A descriptor of the file at `path`, for reading and writing, that holds its lock.

    Raises:
        ValueError: it cannot be opened, or someone else holds the lock, in this process or another.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        except OSError as error:
            raise ValueError(f"disk_path {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise ValueError(f"disk_path {path} is in use by another runtime: choose another path") from error
        os.close(descriptor)  # whoever held the lock before has deleted it: the name is free, or another file's


def unlock(descriptor: int) -> None:
    """Give the lock up. Closing is not enough: a forked child has the descriptor too, and the lock with it."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
