"""Booked memory, rings of it, and host memory that outlives a call."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock

import torch

from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.chunk import Chunk
from tiered.offload.errors import NoRoomError, PinError
from tiered.offload.pinning import pick_pinner

Memory = Callable[[int], Chunk]
KNOBS = {
    Tier.DEVICE: "raise memory=MemoryBudget(device=…), or keep fewer records on the device",
    Tier.HOST: "raise memory=MemoryBudget(host=…)",
    Tier.DISK: "raise memory=MemoryBudget(disk=…, disk_path=…)",
}


def booked(
    ledger: Ledger, tier: Tier, allocate: Callable[[int], Chunk], hint: str | None = None
) -> Callable[[int], Chunk]:
    """`allocate` with bookings: each chunk is booked as `SPARE` of `tier` from before its allocation until `free`.

    The returned function raises TierCapacityError with `hint` if the budget has no room for a chunk. It passes errors
    of `allocate` on. After an error nothing is booked.
    """

    def obtain(nbytes: int) -> Chunk:
        book = partial(ledger.allocate, tier=tier, hint=KNOBS[tier] if hint is None else hint)
        book({Account.SPARE: nbytes})
        chunk = None
        try:
            chunk = allocate(nbytes)
            book({Account.SPARE: chunk.actual_bytes - nbytes})
        except BaseException:
            if chunk is not None:
                chunk.free()
            ledger.release({Account.SPARE: nbytes}, tier)
            raise

        def back() -> None:
            chunk.free()
            ledger.release({Account.SPARE: chunk.actual_bytes}, tier)

        def dropped() -> None:  # a runtime that was never closed leaves the bytes under the accounts of its records
            chunk.free()
            spare = ledger.held(tier, Account.SPARE)
            ledger.release({Account.SPARE: min(chunk.actual_bytes, spare)}, tier)

        return chunk.lent(back, dropped)

    return obtain


class HostPool:
    """Host memory that successive calls share, because pinning takes longer than the copies of a call.

    A chunk stays booked, as `SPARE` until records fill it, whether a call holds it or not. No two calls hold it at the
    same time. A call must wait for all accesses to a chunk before it frees it. If the budget or the system has no room
    for another allocation, chunks that no call holds are given up, smallest first. For several threads.

    Args:
        ledger: books all chunks.
        device: its copy engines must reach the memory.
    """

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._obtain = booked(ledger, Tier.HOST, pick_pinner(device).allocate)
        self._idle: list[Chunk] = []  # smallest first
        self._returned: deque[Chunk] = deque()  # not idle yet: a chunk may return while another thread has the lock
        self._closed = False
        self._lock = RLock()  # reentrant: booking a chunk may give up another
        ledger.add_lender(self, Tier.HOST)

    @property
    def idle_bytes(self) -> int:
        """Bytes of chunks that no call holds."""
        return sum(chunk.actual_bytes for chunk in (*self._idle, *self._returned))

    def take(self, nbytes: int) -> Chunk:
        """A chunk of `nbytes` with undefined content; `free` returns it to the pool. It is never larger, so a call
        holds no more than it booked.

        Raises:
            PinError: the system refused.
            TierCapacityError: the budget has no room for it.
            ValueError: the pool is closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError("this pool is closed")
            self._sort()
            idle = next((chunk for chunk in self._idle if chunk.bytes.numel() == nbytes), None)
            chunk = idle or self._obtained(nbytes)
            lent = chunk.lent(partial(self._back, chunk))
            if idle is not None:
                self._idle.remove(chunk)
                self._ledger.note_peak(Tier.HOST)
        return lent

    def give_up(self) -> bool:
        """Give the smallest chunk that no call holds back to the system; False if there is none."""
        with self._lock:
            self._sort()
            if self._idle:
                self._idle.pop(0).free()
                return True
            return False

    def close(self) -> None:
        """Give up all chunks; those that calls hold, when they free them. May be called again."""
        with self._lock:
            self._closed = True
            while self.give_up():
                pass

    def _obtained(self, nbytes: int) -> Chunk:
        while True:
            try:
                return self._obtain(nbytes)
            except PinError:
                if not self.give_up():
                    raise

    def _back(self, chunk: Chunk) -> None:
        self._returned.append(chunk)
        if self._closed:
            self.close()

    def _sort(self) -> None:
        while self._returned:
            insort(self._idle, self._returned.popleft(), key=lambda chunk: chunk.actual_bytes)


@contextmanager
def tier_errors(tier: Tier) -> Iterator[None]:
    """Raise `TierCapacityError` of `tier` in place of `NoRoomError` and `PinError`."""
    try:
        yield
    except NoRoomError as error:
        raise TierCapacityError(error.needed, error.available, tier, error.hint or KNOBS[tier]) from error
    except PinError as error:
        raise TierCapacityError(error.needed, 0, tier, str(error)) from error
