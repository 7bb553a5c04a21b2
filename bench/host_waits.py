"""Where the host waited for the device: code lines, from what torch flags as synchronizing.

In its debug mode (`torch.cuda.set_sync_debug_mode`) torch warns, from the line of Python that called it, at every copy
between host and device that blocks, and at every wait for a stream: `.item()`, `.tolist()`, `.cpu()`, `torch.tensor`
with a device, indices of which only the device knows how many there are. Waits for an event or for the whole device are
not flagged, so those are counted at the call. What nobody sees: calls of the CUDA runtime that block for reasons of
their own, as some allocations do, copies of pageable memory that were asked not to block, and other libraries. Those
are in a profiler's trace.
"""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch

FLAGGED = "called a synchronizing CUDA operation"  # how torch's warning begins
_HERE = str(Path(__file__).absolute())
_ROOT = Path(__file__).absolute().parents[1]
_TORCH = str(Path(torch.__file__).absolute().parent)


@dataclass(frozen=True, slots=True)
class HostWait:
    """One kind of wait.

    Attributes:
        line: "tiered/forward/forward.py:120", the innermost line that is neither torch's nor this module's.
        what: "flagged" by torch, "event" or "device".
        at: what the caller said it was at.
    """

    line: str
    what: str
    at: str


@contextmanager
def host_waits(at: Callable[[], str] = str) -> Iterator[Counter[HostWait]]:
    """Count the waits of this thread as long as the block lasts; other threads are there to wait. The debug mode is as
    it was afterwards. On a machine without CUDA nothing is counted.

    Args:
        at: what is being done, asked at every wait.
    """
    found: Counter[HostWait] = Counter()
    thread = threading.get_ident()

    def count(what: str) -> None:
        if threading.get_ident() == thread:
            found[HostWait(_line(sys._getframe(1)), what, at())] += 1

    with _flags(count), _counted(torch.cuda.Event, "event", count), _counted(torch.cuda, "device", count):
        yield found


@contextmanager
def _flags(count: Callable[[str], None]) -> Iterator[None]:
    """Let torch warn, and count its warnings in place of showing them."""
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else None
    with warnings.catch_warnings():
        show = warnings.showwarning

        def seen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if str(message).startswith(FLAGGED):
                count("flagged")
            else:
                show(message, *args, **kwargs)

        # Else a line counts once.
        warnings.filterwarnings("always", message=FLAGGED)
        warnings.showwarning = seen
        if mode is not None:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if mode is not None:
                torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _counted(owner: Any, what: str, count: Callable[[str], None]) -> Iterator[None]:
    """Count calls of `owner.synchronize`."""
    original = owner.synchronize

    @wraps(original)
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        count(what)
        return original(*args, **kwargs)

    owner.synchronize = synchronize
    try:
        yield
    finally:
        owner.synchronize = original


def _line(frame: FrameType | None) -> str:
    """Where `frame` or what called it is at, the first that is in code of interest."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in (_HERE, warnings.__file__) and not file.startswith((_TORCH, "<frozen")):
            path = Path(file)
            short = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(path.name)
            return f"{short.as_posix()}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
