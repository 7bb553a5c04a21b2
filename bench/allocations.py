"""Bytes that torch allocates, counted operation by operation: on a CPU, torch's allocator keeps no count."""

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
        """Bytes held now, of storages that these modules (dotted names) made, or that other packages made for them."""
        return sum(self._by_module[module] for module in modules)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        # A result may be a view of an argument, such as weights, whose storage is not new.
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self._made(storage)
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        module = self._alive[key][0] if key in self._alive else _asking_module()  # alive: a tensor given as `out=`
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
    """The innermost module of `tiered` that called the operation under way; "" for none."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("tiered."):
            return name
        frame = frame.f_back
    return ""


def resident_peak(restart: bool = False) -> int | None:
    """Peak resident bytes of this process since the last restart; None if the system keeps no peak. Raises `OSError` if
    the system refuses a restart."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    return int(match[1]) * 1024 if match else None
