"""What torch allocates while something runs, counted operation by operation: on a CPU its allocator keeps no count."""

import re
import sys
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of all storages that operations of this thread make, until they are freed. Active inside a `with`.

    Attributes:
        held: bytes now.
        peak: most bytes at one time.

    Every operation is looked at, so whatever runs under it is slow: never time it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.peak = 0
        self._by_module: Counter[str] = Counter()
        self._alive: dict[int, tuple[str, int]] = {}

    def held_by(self, *modules: str) -> int:
        """Bytes now of storages that code of these modules (dotted names) asked for, or code that they called outside
        the package."""
        return sum(self._by_module[module] for module in modules)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        # What comes out as a view of what went in, weights for one, was there before.
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self._made(storage)
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        module = self._alive[key][0] if key in self._alive else _asking_module()  # alive: what `out=` was given
        self._freed(key)
        self._alive[key] = module, nbytes
        self._by_module[module] += nbytes
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        module, nbytes = self._alive.pop(key, ("", 0))
        self._by_module[module] -= nbytes
        self.held -= nbytes


def _asking_module() -> str:
    """The module of ours that the operation under way was called from; "" for none."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("tiered.") and name != __name__:
            return name
        frame = frame.f_back
    return ""


def resident_peak(restart: bool = False) -> int | None:
    """Peak resident bytes of this process since the last restart; None where the system does not say. Raises `OSError`
    where it does, but lets nobody restart it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    return int(match[1]) * 1024 if match else None
