"""Host memory that the device's copy engines reach asynchronously.

    cupy         cudaHostAlloc of the exact size, past cupy's pool, which rounds up to a power of two
    registered   a private mapping, touched and then registered with CUDA; whole pages
    pageable     ordinary memory: copies from it are not asynchronous on CUDA

torch's pinned memory is not used: its allocator rounds up to a power of two, and keeps freed blocks.
cupy's own allocator is not replaced, because other code may rely on it.
"""

import errno
import mmap
import os
import resource
from abc import ABC, abstractmethod
from contextlib import suppress
from importlib.util import find_spec
from typing import ClassVar

import numpy as np
import torch

from tiered.offload.chunk import Chunk
from tiered.offload.errors import PinError

MOST_REGISTERED_BYTES = 64 << 30  # of one call; no copy may span two registrations, so a chunk is one
_PORTABLE_AND_MAPPED = 3  # cudaHostRegister flags: for every context, and readable by kernels through its address
_POPULATE_WRITE = 23  # madvise, Linux 5.14
_WIPE_ON_FORK = 18  # madvise, Linux 4.14; sandboxes such as gVisor lack it


class Pinner(ABC):
    """One way to obtain host memory for the copies of `device`; `name` is for messages."""

    name: ClassVar[str]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    @abstractmethod
    def available(device: torch.device) -> bool:
        """True if this process can obtain such memory for `device`."""

    def allocate(self, nbytes: int) -> Chunk:
        """Memory of `nbytes` with undefined content. Raises `PinError` if the system refused, and `ValueError` if
        `nbytes` is not positive, or above 64 GiB for `registered`."""
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes of host memory: 1 or more")
        try:
            return self._obtain(nbytes)
        except (OSError, RuntimeError) as error:  # cupy's errors are RuntimeErrors
            raise _refused(nbytes, self.name, error) from error

    @abstractmethod
    def _obtain(self, nbytes: int) -> Chunk: ...


class CupyPinner(Pinner):
    """Exact sizes through cudaHostAlloc, by cupy's class for one allocation."""

    name = "cupy"

    @staticmethod
    def available(device: torch.device) -> bool:
        if device.type != "cuda" or find_spec("cupy") is None:
            return False
        try:
            import cupy  # pyright: ignore[reportMissingImports]
        except ImportError:  # built for another CUDA version
            return False
        return cupy.cuda.is_available()

    def _obtain(self, nbytes: int) -> Chunk:
        from cupy.cuda import pinned_memory  # pyright: ignore[reportMissingImports]

        with torch.cuda.device(self.device):
            pointer = pinned_memory.PinnedMemoryPointer(pinned_memory.PinnedMemory(nbytes), 0)
        # The tensor references the array, and the array the memory.
        memory = torch.from_numpy(np.frombuffer(pointer, np.uint8, count=nbytes))
        return Chunk(memory, pinned=True, actual_bytes=nbytes)


class RegisteredPinner(Pinner):
    """A private mapping of whole pages, registered with CUDA."""

    name = "registered"

    @staticmethod
    def available(device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.is_available()

    def _obtain(self, nbytes: int) -> Chunk:
        if nbytes > MOST_REGISTERED_BYTES:
            raise ValueError(f"{nbytes} bytes are more than one registration takes: {MOST_REGISTERED_BYTES}")
        cudart = torch.cuda.cudart()
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        mapping = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork would share the pages copy-on-write. Our next write would then move our pages, while the device still
        # reads the old ones, now the child's. With the first advice the child has no such pages.
        if not _advise(mapping, _WIPE_ON_FORK):
            _advise(mapping, mmap.MADV_DONTFORK)
        if not _advise(mapping, _POPULATE_WRITE):
            np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE] = 0
        pages = torch.from_numpy(np.frombuffer(mapping, np.uint8))
        address = pages.data_ptr()
        with torch.cuda.device(self.device):
            code = int(cudart.cudaHostRegister(address, whole, _PORTABLE_AND_MAPPED))
        if code:
            _drain_error(self.device)
            raise RuntimeError(f"cudaHostRegister returned {code}")

        def unregister() -> None:
            if int(cudart.cudaHostUnregister(address)):
                _drain_error(self.device)

        return Chunk(pages[:nbytes], pinned=True, actual_bytes=whole, before=unregister)


class PageablePinner(Pinner):
    """Ordinary memory, for a device without CUDA."""

    name = "pageable"

    @staticmethod
    def available(device: torch.device) -> bool:
        return True

    def _obtain(self, nbytes: int) -> Chunk:
        return Chunk(torch.empty(nbytes, dtype=torch.uint8), pinned=False, actual_bytes=nbytes)


# By name, in the order of preference.
PINNERS: dict[str, type[Pinner]] = {kind.name: kind for kind in (CupyPinner, RegisteredPinner, PageablePinner)}


def pick_pinner(device: torch.device) -> Pinner:
    """The first pinner that is available for `device`."""
    return next(kind for kind in PINNERS.values() if kind.available(device))(device)


def _advise(mapping: mmap.mmap, advice: int) -> bool:
    """True if the system took the advice, False if an older kernel or a sandbox does not know it."""
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _drain_error(device: torch.device) -> None:
    """Read CUDA's last error, which would otherwise surface in the next launch of a kernel."""
    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)


def _refused(nbytes: int, name: str, reason: object) -> PinError:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    page, free, whole = (os.sysconf(key) for key in ("SC_PAGESIZE", "SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    return PinError(
        nbytes,
        f"the system refused {nbytes} bytes of host memory ({name}: {reason}). Host RAM is {whole * page} bytes, "
        f"{free * page} free; the memlock limit is {'none' if soft == resource.RLIM_INFINITY else soft}. "
        "Lower memory=MemoryBudget(host=…)",
    )
