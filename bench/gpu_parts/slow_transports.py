"""Transports that carry the same bytes at other times, and one that damages them."""

import random
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from simulation import Delay, Point, SimulatedCuda, SimulatedThreads

from tiered.offload.fence import Event
from tiered.offload.transport import Copy, Lane, TransferEvent, Transport

_CYCLES = 2_000_000  # of the device, a millisecond
_SECONDS = 0.002


def transport(device: torch.device, *, delay: Delay | None = None) -> Transport:
    """The transport of `device`."""
    if device.type != "cuda":
        return SimulatedThreads(delay=delay)
    return SimulatedCuda(device, delay=delay)


def random_delays(device: torch.device, seed: int) -> Delay:
    """Holds up one job or piece in three for up to 2 ms: the host anywhere, and a copy's own stream as well."""
    chance = random.Random(seed)

    def delay(point: Point, lane: Lane | None) -> float:
        if device.type == "cuda" and point is Point.COPY and lane in (Lane.FETCH, Lane.STORE) and chance.random() < 0.3:
            torch.cuda._sleep(int(chance.random() * _CYCLES))  # on the stream that the copy is about to be put on
        return max(0.0, chance.uniform(-2 * _SECONDS, _SECONDS))

    return delay


class Synchronous:
    """See `Transport`; every job has ended before the caller goes on."""

    def __init__(self, carrier: Transport) -> None:
        self._carrier = carrier
        self.device, self.close = carrier.device, carrier.close

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        """Blocks."""
        return _ended(self._carrier.copy(lane, copies, after))

    def run(self, lane: Lane, work: Callable[[], int], after: Iterable[Event] = ()) -> TransferEvent:
        """Blocks."""
        return _ended(self._carrier.run(lane, work, after))

    def wait(self, after: Iterable[Event] = ()) -> TransferEvent:
        """Blocks."""
        return _ended(self._carrier.wait(after))


class Damaging(Synchronous):
    """Each of the first 16 bytes of a stored piece has its lowest bit flipped, which makes no number infinite. It is
    for a control, which has to see the damage."""

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        """Blocks."""
        event = super().copy(lane, copies, after)
        if lane is Lane.STORE:
            with torch.inference_mode():
                for piece in copies:
                    piece.destination[:16].bitwise_xor_(0x01)
        return event


def _ended(event: TransferEvent) -> TransferEvent:
    while not event.done():
        time.sleep(0)
    return event
