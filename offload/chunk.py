"""Memory of the host or the device, with its deallocation."""

import os
import weakref
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.cuda_event import end_of_stream
from tiered.offload.errors import NoRoomError
from tiered.offload.fence import Event


class Chunk:
    """Memory that is allocated until `free`, or until no reference to the chunk is left.

    Args:
        bytes: the memory.
        pinned: True if the device's copy engines reach it.
        actual_bytes: bytes that the system allocated, rounding included.
        earlier: events that end with the accesses of earlier owners.
        before: called once before deallocation; never in a forked child, where CUDA is not usable.
        dropped: called instead of `before` if no reference is left and `free` was not called. None for `before`.
    """

    def __init__(
        self,
        bytes: UInt8[Tensor, " nbytes"],
        *,
        pinned: bool,
        actual_bytes: int,
        earlier: tuple[Event, ...] = (),
        before: Callable[[], object] = lambda: None,
        dropped: Callable[[], object] | None = None,
    ) -> None:
        self._bytes: Tensor | None = bytes
        self.pinned = pinned
        self.actual_bytes = actual_bytes
        self.earlier = earlier
        self._before = partial(_in_process, os.getpid(), before)
        self._finalizer = weakref.finalize(self, _in_process, os.getpid(), dropped or before)
        self._finalizer.atexit = False  # at exit the system frees everything

    @property
    def bytes(self) -> UInt8[Tensor, " nbytes"]:
        """The memory. Raises `ValueError` after `free`."""
        if self._bytes is None:
            raise ValueError("the chunk is freed")
        return self._bytes

    def lent(self, back: Callable[[], object], dropped: Callable[[], object] | None = None) -> "Chunk":
        """The same memory for a holder. Its `free` calls `back`. If the holder becomes garbage without `free`, as after
        Ctrl-C, `dropped` is called instead, on any thread; None for `back`."""
        pinned, nbytes = self.pinned, self.actual_bytes
        return Chunk(self.bytes, pinned=pinned, actual_bytes=nbytes, earlier=self.earlier, before=back, dropped=dropped)

    def free(self) -> None:
        """Free the memory. A view keeps it mapped, but not pinned. May be called again."""
        if self._bytes is None:
            return
        if self._finalizer.detach() is not None:
            self._before()  # the registration must end before the mapping
        self._bytes = None


def _in_process(process: int, action: Callable[[], object]) -> None:
    if os.getpid() == process:
        action()


def device_chunks(device: torch.device) -> Callable[[int], Chunk]:
    """A function that allocates chunks of the device's memory.

    CUDA's allocator reuses memory as soon as its owner drops it, although kernels on the current stream may still use
    it. A copy on another stream has to wait for them, so the chunk has an event of the current stream.

    The function raises NoRoomError if the device has no memory left.
    """

    def allocate(nbytes: int) -> Chunk:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise NoRoomError(nbytes, free, total, f"{device} (memory=MemoryBudget(device=…))") from error
        earlier = (end_of_stream(device),) if device.type == "cuda" else ()
        return Chunk(memory, pinned=False, actual_bytes=nbytes, earlier=earlier)

    return allocate
