"""Segments that touch become one, and the crossover is found, by timers that lie a little."""

import itertools
import random
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiered.kernels.gather_copy_ref import gather_copy
from tiered.offload.routes import (
    SIZES,
    Route,
    Segment,
    crossover_for,
    gather_of,
    measure_crossover,
    neighbours_merged,
    timer_for,
)
from tiered.offload.transport import Copy

KIB = 1024


# --- neighbours


@pytest.mark.parametrize(
    ("segments", "merged"),
    [
        ([], []),
        ([(0, 5, 3)], [(0, 5, 3)]),
        ([(0, 5, 3), (3, 8, 2), (5, 10, 1)], [(0, 5, 6)]),
        ([(0, 5, 3), (3, 9, 2)], [(0, 5, 3), (3, 9, 2)]),  # a hole in the destination
        ([(0, 5, 3), (4, 8, 2)], [(0, 5, 3), (4, 8, 2)]),  # a hole in the source
        ([(0, 5, 3), (3, 2, 3)], [(0, 5, 3), (3, 2, 3)]),  # touches in front, not behind
        ([(0, 5, 0)], []),
        ([(0, 0, 2), (2, 9, 0), (2, 2, 2)], [(0, 0, 4)]),  # nothing lies between
        ([(0, 0, 0), (0, 0, 2)], [(0, 0, 2)]),
        ([(0, 0, 4), (0, 4, 4)], [(0, 0, 4), (0, 4, 4)]),  # one source, twice
    ],
)
def test_merged(segments: list[tuple[int, int, int]], merged: list[tuple[int, int, int]]):
    assert neighbours_merged(segments) == merged


@st.composite
def segment_lists(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Segments sorted by source, with a destination that often goes on where the last one ended."""
    segments, source, destination = [], 0, 0
    for _ in range(draw(st.integers(0, 12))):
        source += draw(st.sampled_from([0, 0, 0, 1, 5]))
        destination = draw(st.just(destination) | st.just(destination) | st.integers(0, 60))
        size = draw(st.integers(0, 4))
        segments.append((source, destination, size))
        source, destination = source + size, destination + size
    return segments


def byte_pairs(segments: list[tuple[int, int, int]] | list[Segment]) -> list[tuple[int, int]]:
    return [(source + i, destination + i) for source, destination, size in segments for i in range(size)]


@given(segment_lists())
def test_merging_moves_the_same_bytes_in_the_same_order(segments: list[tuple[int, int, int]]):
    merged = neighbours_merged(segments)
    assert byte_pairs(merged) == byte_pairs(segments)
    assert all(segment.size > 0 for segment in merged)
    for left, right in itertools.pairwise(merged):
        assert (left.source + left.size, left.destination + left.size) != (right.source, right.destination)
    assert neighbours_merged(merged) == merged


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(4, 0, 1), (3, 1, 1)], "sorted by source: 3 comes after 4"),
        ([(-1, 0, 1)], r"\(-1, 0, 1\)"),
        ([(0, -1, 1)], r"\(0, -1, 1\)"),
        ([(0, 0, -1)], r"\(0, 0, -1\)"),
    ],
)
def test_what_cannot_be_merged(segments: list[tuple[int, int, int]], message: str):
    with pytest.raises(ValueError, match=message):
        neighbours_merged(segments)


# --- crossover


def link_timer(route: Route, size: int) -> float:
    """An engine that is slower to begin with and has more bandwidth than a gather: they meet at 45.6 KiB."""
    return 5e-6 + size / 25e9 if route is Route.ENGINE else size / 17.5e9 + 4.2e-6


def at(*, engine_from: int):
    return lambda route, size: 1.0 if (size >= engine_from) == (route is Route.ENGINE) else 2.0


@pytest.mark.parametrize("engine_from", [2 * KIB, 8 * KIB, 16 * KIB])
def test_the_crossover_is_found(engine_from: int):
    sizes = [KIB << power for power in range(6)]
    assert measure_crossover(at(engine_from=engine_from), sizes) == engine_from


def test_no_crossover():
    sizes = [KIB, 2 * KIB]
    assert measure_crossover(at(engine_from=0), sizes) == 0
    assert measure_crossover(at(engine_from=KIB), sizes) == 0
    assert measure_crossover(at(engine_from=4 * KIB), sizes) == sys.maxsize
    assert measure_crossover(lambda route, size: 1.0, sizes) == 0  # as fast: the engine leaves the processors alone


def test_the_crossover_of_a_link():
    sizes = [KIB << power for power in range(10)]
    assert all((link_timer(Route.ENGINE, s) < link_timer(Route.GATHER, s)) == (s >= 64 * KIB) for s in sizes)
    assert measure_crossover(link_timer, sizes) == 64 * KIB


@pytest.mark.parametrize(
    ("engine", "gather", "crossover"),
    [
        ([1.0, 10.0, 1.0], [1.1, 1.0, 2.0], 3),  # much at one size weighs more than little at another
        ([4.0, 100.0, 15000.0], [1.0, 500.0, 10000.0], 2),  # by ratio: a large record is no more than a small one
    ],
)
def test_what_a_size_weighs(engine: list[float], gather: list[float], crossover: int):
    times = {Route.ENGINE: engine, Route.GATHER: gather}
    assert measure_crossover(lambda route, size: times[route][size - 1], [1, 2, 3]) == crossover


@pytest.mark.parametrize("wrong", range(10))
def test_one_wrong_time_moves_no_clear_size(wrong: int):
    """Each size is clear by a factor of 2; the wrong time makes one of them look clear the other way round."""
    sizes = [KIB << power for power in range(10)]

    def time_of(route: Route, size: int) -> float:
        time = at(engine_from=32 * KIB)(route, size)
        return time * 3.5 if size == sizes[wrong] and time == 1.0 else time

    found = measure_crossover(time_of, sizes)
    assert found in ({32 * KIB} if wrong not in (4, 5) else {16 * KIB, 32 * KIB, 64 * KIB})


def test_noise_costs_little():
    """Of times that are off by up to 20 %, the split still loses at most 5 % against the best one, on the mean."""
    sizes = [KIB << power for power in range(10)]
    loss = []
    for seed in range(200):
        chance = random.Random(seed)
        found = measure_crossover(lambda route, size: link_timer(route, size) * chance.uniform(0.8, 1.2), sizes)  # noqa: B023
        taken = [link_timer(Route.ENGINE if size >= found else Route.GATHER, size) for size in sizes]
        best = [min(link_timer(route, size) for route in Route) for size in sizes]
        loss.append(sum(taken) / sum(best) - 1)
    assert sum(loss) / len(loss) < 0.05


@pytest.mark.parametrize("sizes", [[], [0, 1], [-1], [2, 1], [1, 1]])
def test_what_sizes_cannot_be_tried(sizes: list[int]):
    with pytest.raises(ValueError, match="rising from 1 or more"):
        measure_crossover(link_timer, sizes)


@pytest.mark.parametrize("time", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_time(time: float):
    with pytest.raises(ValueError, match=f"2 bytes took 1.0 s by engine and {time} s by gather"):
        measure_crossover(lambda route, size: time if (route, size) == (Route.GATHER, 2) else 1.0, [1, 2])


def test_a_cpu_has_one_route():
    assert crossover_for(torch.device("cpu")) == 0


# --- gather


def numbered(size: int, first: int = 0) -> Tensor:
    return (torch.arange(size) + first).to(torch.uint8)


def pieces_of(segments: list[tuple[int, int, int]], source: Tensor, destination: Tensor) -> list[Copy]:
    return [Copy(source[start : start + size], destination[to : to + size]) for start, to, size in segments]


@pytest.mark.parametrize(
    ("segments", "offset"),
    [
        ([(0, 64, 32), (128, 0, 16), (32, 112, 144)], 0),
        ([(0, 0, 16), (0, 16, 16)], 0),  # one source, twice
        ([(64, 32, 0), (16, 16, 16)], 0),
        ([(0, 64, 32), (128, 0, 16)], 48),  # the buffers that the pieces lie in are themselves views
    ],
)
def test_pieces_as_a_gather(segments: list[tuple[int, int, int]], offset: int):
    source, gathered, copied = numbered(512), torch.zeros(512, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)
    for piece in pieces_of(segments, source[offset:], copied[offset:]):
        piece.destination.copy_(piece.source)
    gather = gather_of(pieces_of(segments, source[offset:], gathered[offset:]))
    assert gather is not None
    offsets = torch.tensor(gather.segments).T
    gather_copy(gather.source, offsets[0], gather.destination, offsets[1], offsets[2], programs=1)
    assert torch.equal(gathered, copied)


@pytest.mark.parametrize(
    "segments",
    [
        [(8, 0, 16), (32, 32, 16)],
        [(0, 8, 16), (32, 32, 16)],
        [(0, 0, 8), (32, 32, 16)],
        [(0, 0, 32), (32, 16, 32)],  # in order, the second one wins; a kernel has no order
    ],
)
def test_pieces_that_no_gather_takes(segments: list[tuple[int, int, int]]):
    assert gather_of(pieces_of(segments, numbered(128), torch.zeros(128, dtype=torch.uint8))) is None


@pytest.mark.parametrize("side", ["source", "destination"])
def test_pieces_of_several_buffers_are_no_gather(side: str):
    one, other = (pieces_of([(0, 0, 16), (16, 16, 16)], numbered(64), numbered(64)) for _ in range(2))
    mixed = Copy(other[1].source, one[1].destination) if side == "source" else Copy(one[1].source, other[1].destination)
    assert gather_of([one[0], one[1]]) is not None
    assert gather_of([one[0], mixed]) is None


def test_a_buffer_that_is_not_aligned_is_no_gather():
    """Its offsets may be multiples of 16; its address decides as well."""
    words = torch.zeros(65, dtype=torch.uint8).numpy()
    source = next(
        buffer for buffer in (torch.from_numpy(words[start : start + 64]) for start in (0, 1)) if buffer.data_ptr() % 16
    )
    assert gather_of(pieces_of([(0, 0, 16), (16, 16, 16)], source, torch.zeros(64, dtype=torch.uint8))) is None


# --- on a GPU


@pytest.mark.gpu
def test_both_routes_are_timed_and_move_the_same_bytes():
    device = torch.device("cuda")
    crossover = crossover_for(device)
    assert crossover in (0, *SIZES, sys.maxsize)
    assert crossover_for(device) == crossover
    time_of = timer_for(device)
    assert all(0 < time_of(route, SIZES[0]) < 1 for route in Route)
    source = numbered(4096).pin_memory()
    destination = torch.zeros(4096, dtype=torch.uint8, device=device)
    gather = gather_of(pieces_of([(0, 2048, 1024), (2048, 0, 512), (1024, 512, 1024)], source, destination))
    assert gather is not None
    gather.launch(device)
    host = destination.cpu()
    assert torch.equal(host[2048:3072], source[:1024])
    assert torch.equal(host[:512], source[2048:2560])
    assert torch.equal(host[512:1536], source[1024:2048])
    assert not host[1536:2048].any() and not host[3072:].any()
