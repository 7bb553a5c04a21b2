"""How host memory is obtained, so that the device's copy engines reach it without a stop.

    cupy         cudaHostAlloc of the exact size, past cupy's pool
    registered   a private mapping, touched and then registered with CUDA; whole pages
    torch        torch's pinned memory; its allocator rounds up to a power of two
    pageable     ordinary memory: copies from it are not asynchronous on CUDA

cupy's own allocator stays as it is: its pool rounds to powers of two, and other code may rely on it.
"""

import errno
import mmap
import os
import resource
from contextlib import suppress
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from tiered.offload.chunk import Chunk
from tiered.offload.errors import PinError

MOST_REGISTERED_BYTES = 64 << 30  # a call; no copy may span two registrations, so a chunk is one
_PORTABLE_AND_MAPPED = 3  # cudaHostRegister flags: for every context, and readable by kernels through its address
_POPULATE_WRITE = 23  # madvise, Linux 5.14
_WIPE_ON_FORK = 18  # madvise, Linux 4.14; sandboxes such as gVisor lack it


@runtime_checkable
class Pinner(Protocol):
    """One way to obtain host memory."""

    name: str

    def allocate(self, nbytes: int) -> Chunk:
        """Memory of `nbytes` with undefined content.

        Raises:
            PinError: the system refused.
            ValueError: `nbytes` is not positive.
        """
        ...


class CupyPinner:
    """Exact sizes through cudaHostAlloc, by cupy's class for one allocation."""

    name = "cupy"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def available(device: torch.device) -> bool:
        """Whether cupy is installed and sees a device."""
        if device.type != "cuda" or find_spec("cupy") is None:
            return False
        try:
            import cupy  # pyright: ignore[reportMissingImports]
        except ImportError:  # built for another CUDA version
            return False
        return cupy.cuda.is_available()

    def allocate(self, nbytes: int) -> Chunk:
        """See `Pinner`. The tensor holds the array, and the array the memory."""
        from cupy.cuda import pinned_memory, runtime  # pyright: ignore[reportMissingImports]

        _check_size(nbytes)
        try:
            with torch.cuda.device(self.device):
                pointer = pinned_memory.PinnedMemoryPointer(pinned_memory.PinnedMemory(nbytes), 0)
        except runtime.CUDARuntimeError as error:
            raise _refused(nbytes, self.name, error) from error
        memory = torch.from_numpy(np.frombuffer(pointer, np.uint8, count=nbytes))
        return Chunk(memory, pinned=True, actual_bytes=nbytes)


class RegisteredPinner:
    """A private mapping of whole pages, registered with CUDA."""

    name = "registered"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def available(device: torch.device) -> bool:
        """Whether torch has CUDA."""
        return device.type == "cuda" and torch.cuda.is_available()

    def allocate(self, nbytes: int) -> Chunk:
        """See `Pinner`; a ValueError above 64 GiB too."""
        _check_size(nbytes)
        if nbytes > MOST_REGISTERED_BYTES:
            raise ValueError(f"{nbytes} bytes are more than one registration takes: {MOST_REGISTERED_BYTES}")
        cudart = torch.cuda.cudart()
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mapping = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A fork would share the pages copy-on-write, and the next write of ours would leave them to the child while
            # the device still reads there. Without the first advice the child has no such pages at all.
            if not _advise(mapping, _WIPE_ON_FORK):
                _advise(mapping, mmap.MADV_DONTFORK)
            if not _advise(mapping, _POPULATE_WRITE):
                np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE] = 0
        except (OSError, ValueError) as error:
            raise _refused(nbytes, self.name, error) from error
        pages = torch.from_numpy(np.frombuffer(mapping, np.uint8))
        address = pages.data_ptr()
        with torch.cuda.device(self.device):
            code = int(cudart.cudaHostRegister(address, whole, _PORTABLE_AND_MAPPED))
        if code:
            _drain_error(self.device)
            raise _refused(nbytes, self.name, f"cudaHostRegister returned {code}")

        def unregister() -> None:
            if int(cudart.cudaHostUnregister(address)):
                _drain_error(self.device)

        return Chunk(pages[:nbytes], pinned=True, actual_bytes=whole, before=unregister)


class TorchPinner:
    """torch's pinned memory. Ask for powers of two, or lose up to half."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def available(device: torch.device) -> bool:
        """Whether torch has CUDA."""
        return device.type == "cuda" and torch.cuda.is_available()

    def allocate(self, nbytes: int) -> Chunk:
        """See `Pinner`."""
        _check_size(nbytes)
        try:
            with torch.cuda.device(self.device):
                memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise _refused(nbytes, self.name, error) from error
        # The allocator would keep a freed block for itself.
        return Chunk(memory, pinned=True, actual_bytes=1 << (nbytes - 1).bit_length(), after=torch._C._host_emptyCache)


class PageablePinner:
    """Ordinary memory, for a machine without CUDA, or where nothing may be pinned."""

    name = "pageable"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def available(device: torch.device) -> bool:
        """Always."""
        return True

    def allocate(self, nbytes: int) -> Chunk:
        """See `Pinner`."""
        _check_size(nbytes)
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise _refused(nbytes, self.name, error) from error
        return Chunk(memory, pinned=False, actual_bytes=nbytes)


_PINNERS = {kind.name: kind for kind in (CupyPinner, RegisteredPinner, TorchPinner, PageablePinner)}
_AUTO = (CupyPinner, RegisteredPinner, PageablePinner)


def pick_pinner(name: str, device: torch.device) -> Pinner:
    """The pinner of that name; "auto": cupy, else registered, else pageable, whichever is there for `device` first.

    Raises:
        ValueError: an unknown name, or one that does not work here.
    """
    if name == "auto":
        return next(kind for kind in _AUTO if kind.available(device))(device)
    if name not in _PINNERS:
        raise ValueError(f"unknown pinner {name!r}; allowed: 'auto', {', '.join(map(repr, _PINNERS))}")
    if not _PINNERS[name].available(device):
        there = [repr(other) for other, kind in _PINNERS.items() if kind.available(device)]
        raise ValueError(f"pinner {name!r} does not work for device {device} here; these do: {', '.join(there)}")
    return _PINNERS[name](device)


def _check_size(nbytes: int) -> None:
    if nbytes < 1:
        raise ValueError(f"cannot allocate {nbytes} bytes of host memory: 1 or more")


def _advise(mapping: mmap.mmap, advice: int) -> bool:
    """Whether the system took the advice; False where it does not know it, as an older kernel or a sandbox."""
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _drain_error(device: torch.device) -> None:
    """CUDA keeps the last error until someone asks; left there, it would surface in the next launch of a kernel."""
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
