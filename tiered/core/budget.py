"""The budget: bytes that each tier may hold."""

import os
import shutil
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from tiered.core.byte_size import parse_bytes
from tiered.core.features import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A hard cap in bytes on the runtime's allocations in each tier; None for no cap.

    Sizes are ints in bytes, or strings with a unit (`"12GiB"`). Weights, caches, logits, activations and staging all
    count. `disk_path` is an existing folder, in which the disk tier is an unnamed file, for layers of weights. Without
    a `disk` cap, or with one of 0, there is no disk tier.

    Raises:
        TypeError, ValueError: an invalid byte size, a disk cap without a `disk_path`, or a `disk_path` that is not an
            existing, writable folder on a file system with room for files.
    """

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None
    disk_path: str | Path | None = None

    def __post_init__(self) -> None:
        for tier in Tier:
            size = getattr(self, tier.value)
            if size is not None:
                object.__setattr__(self, tier.value, parse_bytes(size))
        if self.disk and self.disk_path is None:
            raise ValueError(f"a disk budget of {self.disk} bytes needs a disk_path, an existing folder for its file")
        if self.disk_path is not None:
            _check_folder(self.disk_path)

    def cap(self, tier: Tier) -> int | None:
        """The cap of `tier` in bytes; None for no cap."""
        return getattr(self, tier.value)

    def with_cap(self, tier: Tier, cap: int | None) -> "MemoryBudget":
        """The same budget with another cap. `disk_path` is not checked again, because it may be gone."""
        other = copy(self)
        object.__setattr__(other, tier.value, cap)
        return other

    @classmethod
    def of(cls, memory: "MemoryBudget | int | str | None") -> "MemoryBudget":
        """`memory` as a budget: a single size is the device tier's cap; None for no caps."""
        return memory if isinstance(memory, MemoryBudget) else cls(device=memory)


def _check_folder(path: object) -> None:
    if not isinstance(path, str | Path):
        raise TypeError(f"disk_path = {path!r}; a str or a Path of an existing folder is allowed")
    if not os.path.isdir(path):
        found = "something else" if os.path.lexists(path) else "nothing"
        raise ValueError(f"disk_path = {str(path)!r} must be an existing folder; {found} is there")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"disk_path = {str(path)!r} must be a writable folder")
    if not shutil.disk_usage(path).total:
        raise ValueError(f"disk_path = {str(path)!r} must be a folder on a disk; its file system has no room for files")
