"""How the jobs between tiers are counted when they have ended."""

from collections.abc import Callable, Iterable, Sequence

import torch

from tiered.core.events import CopyEnded, TierEvent, Waited
from tiered.offload import fence
from tiered.offload.host_event import HostEvent
from tiered.offload.lane import Lane
from tiered.offload.transport import Copy, TransferEvent
from tiered.tiers.traffic import Traffic


class Watched(HostEvent):
    """Ends when the test says so, and counts how often it was asked."""

    asked = 0

    def done(self) -> bool:
        Watched.asked += 1
        return super().done()


class ByHand:
    """A transport whose jobs the test ends."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[Watched] = []

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[fence.Event] = ()) -> TransferEvent:
        return self._made(Watched(lane, len(copies)))

    def run(self, lane: Lane, work: Callable[[], int], after: Iterable[fence.Event] = ()) -> TransferEvent:
        return self._made(Watched(lane))

    def wait(self, after: Iterable[fence.Event] = ()) -> TransferEvent:
        return self._made(Watched(None))

    def close(self) -> None: ...

    def _made(self, event: Watched) -> Watched:
        self.events.append(event)
        return event


def test_every_job_is_counted_once_in_the_order_of_its_lane():
    transport, counted = ByHand(), list[TierEvent]()
    traffic = Traffic(transport, counted.append)
    for number in range(4):
        piece = Copy(torch.zeros(1), torch.zeros(1))
        lane = (Lane.STORE, Lane.FETCH)[number % 2]
        traffic.move(lane, [piece] * (number + 1), reads=[], writes=[])
        traffic.compute(Lane.STORE, layer=number)
    stored, _, fetched, encoded, *_ = transport.events
    traffic.harvest()
    assert counted == []
    fetched.end(2)
    encoded.end(0)
    traffic.harvest()
    assert [type(event) for event in counted] == [CopyEnded]  # compute still has an earlier one to end
    stored.fail("broken", OSError())
    for event in transport.events:
        event.end(1)
    for _ in range(2):
        traffic.synchronize()
    copies = [event for event in counted if isinstance(event, CopyEnded)]
    assert [event.copies for event in copies if event.lane is Lane.STORE] == [1, 3]
    assert [event.copies for event in copies if event.lane is Lane.FETCH] == [2, 4]
    assert [event.failed for event in copies] == [event.copies == 1 for event in copies]
    assert [event.layer for event in counted if isinstance(event, Waited)] == [0, 1, 2, 3]
    assert len(counted) == 8


def test_counting_queries_one_job_of_a_lane():
    """A refresh has a thousand jobs under way, and a harvest counts all that ended."""
    transport = ByHand()
    traffic = Traffic(transport, lambda event: None)
    for number in range(500):
        traffic.move(Lane(("store", "fetch")[number % 2]), [], reads=[], writes=[])
    Watched.asked = 0
    for _ in range(10):
        traffic.harvest()
    assert Watched.asked == 10 * 2
