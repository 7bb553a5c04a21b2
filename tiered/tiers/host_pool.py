"""Memory under the books, rings of it, and host memory that outlives a call."""

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
    """`allocate`, whose chunks are in the books as `SPARE` of `tier` from before they are there until they are freed.

    What it makes raises TierCapacityError with `hint` where the budget has no room for a chunk, and what `allocate`
    raises; then nothing is booked.
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
    """Host memory that one call after another uses: pinning takes longer than the copies of a call.

    A chunk is in the books, as `SPARE` until records fill it, whether a call holds it or not; no two calls hold it at a
    time. Whoever gives one back has waited for all that was under way in it. Where the budget or the system has no room
    for something else, chunks that no call holds are given up, smallest first. For several threads.

    Args:
        ledger: of all that is obtained.
        device: whose copy engines are to reach the memory.
    """

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._obtain = booked(ledger, Tier.HOST, pick_pinner(device).allocate)
        self._idle: list[Chunk] = []  # smallest first
        self._returned: deque[Chunk] = deque()  # not among them yet: a chunk may come back while others have the lock
        self._closed = False
        self._lock = RLock()  # a chunk that is booked may have another given up
        ledger.add_lender(self, Tier.HOST)

    @property
    def idle_bytes(self) -> int:
        """Bytes that no call holds."""
        return sum(chunk.actual_bytes for chunk in (*self._idle, *self._returned))

    def take(self, nbytes: int) -> Chunk:
        """A chunk of `nbytes` with undefined content, which `free` brings back. It is never larger: a call holds no
        more than it booked.

        Raises:
            PinError: the system refused.
            TierCapacityError: the budget has no room for it.
            ValueError: closed.
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
        """Give the smallest chunk that no call holds back to the system; False where there is none."""
        with self._lock:
            self._sort()
            if self._idle:
                self._idle.pop(0).free()
                return True
            return False

    def close(self) -> None:
        """Give everything up; what calls hold, once they give it back. May be called again."""
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
def told_by_tier(tier: Tier) -> Iterator[None]:
    """What a storage lacks, as the error of the public contract."""
    try:
        yield
    except NoRoomError as error:
        raise TierCapacityError(error.needed, error.available, tier, error.hint or KNOBS[tier]) from error
    except PinError as error:
        raise TierCapacityError(error.needed, 0, tier, str(error)) from error
