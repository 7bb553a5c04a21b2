"""Simulated transports: a slow link is never faster than it says, and a delay holds up every point of a job.

How much slower a link is depends on the machine, so that is not asserted.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from simulation import Link, LinkSpeed, Point, SharedLink, SimulatedThreads

from tiered.offload.errors import TransferError
from tiered.offload.transport import Copy, Lane, TransferEvent

MOMENT = 0.05


def seconds(event: TransferEvent) -> float:
    event.synchronize()
    times = event.times
    assert times.started is not None and times.ended is not None
    return (times.ended - times.started) / 1e9


def pieces(count: int, size: int) -> list[Copy]:
    return [Copy(torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)) for _ in range(count)]


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize(
    ("speed", "count", "size", "least"),
    [
        (LinkSpeed(bandwidth=1e6), 1, 30_000, 0.03),
        (LinkSpeed(bandwidth=1e6), 3, 10_000, 0.03),
        (LinkSpeed(latency=0.01), 3, 1, 0.03),  # each piece waits once
        (LinkSpeed(bandwidth=1e6, latency=0.01), 2, 10_000, 0.04),
    ],
)
def test_a_copy_is_never_faster(lane: Lane, speed: LinkSpeed, count: int, size: int, least: float):
    transport = SimulatedThreads(link=Link(**{lane.value: speed}))
    moved = pieces(count, size)
    assert seconds(transport.copy(lane, moved)) >= least == speed.seconds(count * size, count)
    assert all(piece.destination.eq(1).all() for piece in moved)
    transport.close()


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.SAVE])
def test_work_is_never_faster_than_the_bytes_that_it_moved(lane: Lane):
    transport = SimulatedThreads(link=Link(**{lane.value: LinkSpeed(bandwidth=1e6, latency=0.01)}))
    assert seconds(transport.run(lane, lambda: 20_000)) >= 0.03
    transport.close()


@pytest.mark.parametrize("lane", Lane)
def test_a_lane_has_a_speed_of_its_own(lane: Lane):
    """Three lanes of a minute a piece leave the fourth alone."""
    slow = LinkSpeed(latency=60)
    transport = SimulatedThreads(link=Link(**{other.value: slow for other in Lane if other is not lane}))
    assert seconds(transport.copy(lane, pieces(1, 10))) < 30
    transport.close()


def test_one_job_after_another():
    """A lane carries one job at a time, so their times add up."""
    transport = SimulatedThreads(link=Link(fetch=LinkSpeed(bandwidth=1e6)))
    events = [transport.copy(Lane.FETCH, pieces(1, 10_000)) for _ in range(4)]
    assert all(seconds(event) >= 0.01 for event in events)
    first, last = events[0].times, events[-1].times
    assert first.started is not None and last.ended is not None
    assert last.ended - first.started >= 0.04e9
    transport.close()


@dataclass(frozen=True, kw_only=True)
class Watched(SharedLink):
    """`carried`: the bytes of every piece, in the order of their turns."""

    carried: list[int] = field(default_factory=list)

    @contextmanager
    def carrying(self, lane: Lane, nbytes: int) -> Iterator[None]:
        with super().carrying(lane, nbytes):
            self.carried.append(nbytes)
            yield

    def queued(self, count: int) -> None:
        """Wait until as many pieces are at the engine."""
        deadline = time.monotonic() + 20
        while len(self.engines[Lane.FETCH].queue) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.mark.parametrize(("piece", "carried"), [(10, [10, 1, 10, 10, 15]), (100, [45, 1])])
def test_a_small_copy_waits_for_one_piece_of_a_large_one(piece: int, carried: list[int]):
    """Of another transport, on the link that both share."""
    link, moved, events = Watched(), [pieces(1, 45), pieces(1, 1)], list[TransferEvent]()
    transports = [SimulatedThreads(link=link) for _ in moved]
    with link.engines[Lane.FETCH].turn():  # both are there before the first of them is carried
        for number, transport in enumerate(transports):
            transport.piece_bytes = piece
            events.append(transport.copy(Lane.FETCH, moved[number]))
            link.queued(number + 2)
    for transport in transports:
        transport.close()
    assert link.carried == carried and not any(event.failed for event in events)
    assert all(copy.destination.eq(1).all() for (copy,) in moved)


def test_a_shared_link_is_as_fast_as_one_transport_and_no_faster():
    link = SharedLink(fetch=LinkSpeed(bandwidth=1e6))
    transports = [SimulatedThreads(link=link) for _ in range(2)]
    events = [transport.copy(Lane.FETCH, pieces(2, 10_000)) for transport in transports]
    seen = [event.times for event in events if seconds(event) >= 0.02]
    begun, ended = ([getattr(times, name) for times in seen] for name in ("started", "ended"))
    assert len(seen) == 2 and max(ended) - min(begun) >= 0.04e9
    for transport in transports:
        transport.close()


def test_a_failed_piece_gives_its_turn_back():
    link = SharedLink()
    transport = SimulatedThreads(link=link)
    with pytest.raises(RuntimeError), link.carrying(Lane.FETCH, 1):
        raise RuntimeError
    assert seconds(transport.copy(Lane.FETCH, pieces(1, 10))) < 20
    transport.close()


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0, 0), (-1, 0), (math.nan, 0), (1, -1), (1, math.inf), (1, math.nan)]
)
def test_bad_speeds_are_refused(bandwidth: float, latency: float):
    with pytest.raises(ValueError, match=f"bandwidth = {bandwidth} must be positive, latency = {latency}"):
        LinkSpeed(bandwidth, latency)


@pytest.mark.parametrize("compute_thread", [False, True])
def test_points_that_ask_for_a_delay(compute_thread: bool):
    asked: list[tuple[Point, Lane | None]] = []

    def delay(point: Point, lane: Lane | None) -> float:
        asked.append((point, lane))
        return 0.0

    transport = SimulatedThreads(compute_thread=compute_thread, delay=delay)
    pieces = [Copy(torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))] * 2
    fetched = transport.copy(Lane.FETCH, pieces)
    fetched.synchronize()
    loaded = transport.run(Lane.LOAD, lambda: 0, after=[fetched])
    loaded.synchronize()
    transport.wait([fetched, loaded]).synchronize()
    transport.close()
    assert asked == [
        *((Point.SUBMIT, Lane.FETCH), (Point.COPY, Lane.FETCH), (Point.COPY, Lane.FETCH)),
        *((Point.SUBMIT, Lane.LOAD), (Point.WAIT, Lane.LOAD), (Point.COPY, Lane.LOAD)),
        *((Point.SUBMIT, None), (Point.WAIT, None), (Point.WAIT, None)),
    ]


@pytest.mark.parametrize("point", Point)
def test_a_delay_sleeps(point: Point):
    transport = SimulatedThreads(delay=lambda at, _: MOMENT if at is point else 0.0)
    before = time.monotonic()
    first = transport.copy(Lane.FETCH, [Copy(torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))])
    transport.copy(Lane.STORE, [], after=[first]).synchronize()
    assert time.monotonic() - before >= MOMENT
    transport.close()


@pytest.mark.parametrize(("error", "later"), [(OSError("bad sector"), None), (SystemExit("killed"), "thread .* died")])
@pytest.mark.parametrize("point", [Point.COPY, Point.WAIT])
def test_a_fault_that_a_delay_injects(point: Point, error: BaseException, later: str | None):
    faults = [error]

    def delay(at: Point, lane: Lane | None) -> float:
        if at is point and faults:
            raise faults.pop()
        return 0.0

    transport = SimulatedThreads(delay=delay)
    pieces = [Copy(torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))]
    ready = transport.run(Lane.SAVE, lambda: 0) if point is Point.WAIT else transport.wait()
    failed = transport.copy(Lane.FETCH, pieces, after=[ready])
    with pytest.raises(TransferError, match=str(error)):
        failed.synchronize()
    next_one = transport.copy(Lane.FETCH, pieces)
    if later is None:
        next_one.synchronize()
        assert pieces[0].destination.tolist() == [1] * 4
    else:
        with pytest.raises(TransferError, match=later):
            next_one.synchronize()
    transport.close()
