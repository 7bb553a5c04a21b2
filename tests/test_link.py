"""A slow link: never faster than it says; how much slower depends on the machine, so that is not asserted."""

import math

import pytest
import torch

from tiered.offload.link import Link, LinkSpeed
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Copy, Lane, TransferEvent


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
    transport = ThreadTransport(link=Link(**{lane.value: speed}))
    moved = pieces(count, size)
    assert seconds(transport.copy(lane, moved)) >= least == speed.seconds(count * size, count)
    assert all(piece.destination.eq(1).all() for piece in moved)
    transport.close()


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.SPILL])
def test_work_is_never_faster_than_the_bytes_that_it_moved(lane: Lane):
    transport = ThreadTransport(link=Link(**{lane.value: LinkSpeed(bandwidth=1e6, latency=0.01)}))
    assert seconds(transport.run(lane, lambda: 20_000)) >= 0.03
    transport.close()


@pytest.mark.parametrize("lane", Lane)
def test_a_lane_has_a_speed_of_its_own(lane: Lane):
    """Three lanes of a minute a piece leave the fourth alone."""
    slow = LinkSpeed(latency=60)
    transport = ThreadTransport(link=Link(**{other.value: slow for other in Lane if other is not lane}))
    assert seconds(transport.copy(lane, pieces(1, 10))) < 30
    transport.close()


def test_one_job_after_another():
    """A lane carries one job at a time, so their times add up."""
    transport = ThreadTransport(link=Link(fetch=LinkSpeed(bandwidth=1e6)))
    events = [transport.copy(Lane.FETCH, pieces(1, 10_000)) for _ in range(4)]
    assert all(seconds(event) >= 0.01 for event in events)
    first, last = events[0].times, events[-1].times
    assert first.started is not None and last.ended is not None
    assert last.ended - first.started >= 0.04e9
    transport.close()


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0, 0), (-1, 0), (math.nan, 0), (1, -1), (1, math.inf), (1, math.nan)]
)
def test_what_is_no_speed(bandwidth: float, latency: float):
    with pytest.raises(ValueError, match=f"bandwidth = {bandwidth} must be positive, latency = {latency}"):
        LinkSpeed(bandwidth, latency)
