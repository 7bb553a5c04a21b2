"""Sizes of the clusters that too large ones are cut into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.clustering.allocation import cut_sizes


@pytest.mark.parametrize(
    ("sizes", "most_rows", "expected"),
    [
        ([], 4, ()),
        ([4, 3], 4, (4, 3)),
        ([5], 4, (3, 2)),  # even, not 4 and 1
        ([10, 1], 4, (4, 3, 3, 1)),
        ([0, 2, 0], 1, (1, 1)),
    ],
)
def test_cuts(sizes: list[int], most_rows: int, expected: tuple[int, ...]):
    assert cut_sizes(sizes, most_rows) == expected


@given(st.lists(st.integers(0, 300)), st.integers(1, 80))
def test_every_cluster_is_cut_evenly(sizes: list[int], most_rows: int):
    cut = iter(cut_sizes(sizes, most_rows))
    for size in sizes:
        rows = [next(cut) for _ in range((size + most_rows - 1) // most_rows)]
        assert sum(rows) == size
        assert not rows or (max(rows) <= most_rows and max(rows) - min(rows) <= 1)
        assert rows == sorted(rows, reverse=True)
    assert next(cut, None) is None
