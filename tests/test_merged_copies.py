"""Segments that touch become one, and the same bytes move."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.offload.copy_segments import Segment, merge_neighbours


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
    assert merge_neighbours(segments) == merged


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
    merged = merge_neighbours(segments)
    assert byte_pairs(merged) == byte_pairs(segments)
    assert all(segment.size > 0 for segment in merged)
    for left, right in itertools.pairwise(merged):
        assert (left.source + left.size, left.destination + left.size) != (right.source, right.destination)
    assert merge_neighbours(merged) == merged
