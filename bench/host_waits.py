"""Lines of code at which the host waited for the device.

In its debug mode (`torch.cuda.set_sync_debug_mode`) torch warns at every blocking copy between host and device, and at
every wait for a stream. Such calls are `.item()`, `.tolist()`, `.cpu()`, `torch.tensor` with a device, and indices
whose number only the device knows. torch does not flag waits for an event or for the whole device: their calls are
counted. Not counted are waits of other libraries, and some of the CUDA runtime: allocations may block, and so may
non-blocking copies of pageable memory. A profiler's trace shows them.
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
        line: the innermost line that is neither torch's nor this module's, such as "tiered/forward/forward.py:120".
        what: kind of wait: "flagged" by torch, "event" or "device".
        at: name of the work under way, from the caller.
    """

    line: str
    what: str
    at: str


@contextmanager
def host_waits(at: Callable[[], str] = str) -> Iterator[Counter[HostWait]]:
    """Count the waits of this thread while the block lasts; other threads are there to wait. The debug mode is restored
    afterwards. On a machine without CUDA nothing is counted.

    Args:
        at: gives the name of the work under way; called at every wait.
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

        # By default, a line warns once.
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
    """File and line of the innermost frame from `frame` on that is neither torch's nor this module's; "?" for none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in (_HERE, warnings.__file__) and not file.startswith((_TORCH, "<frozen")):
            path = Path(file)
            short = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(path.name)
            return f"{short.as_posix()}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
