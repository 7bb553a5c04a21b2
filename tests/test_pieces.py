"""How clusters are cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.clustering.allocation import Piece, pieces


@pytest.mark.parametrize(
    ("sizes", "max_rows", "expected"),
    [
        ([], 4, []),
        ([4, 3], 4, [(0, 0, 4), (1, 4, 7)]),
        ([5], 4, [(0, 0, 3), (0, 3, 5)]),  # even, not 4 and 1
        ([10, 1], 4, [(0, 0, 4), (0, 4, 7), (0, 7, 10), (1, 10, 11)]),
        ([0, 2, 0], 1, [(1, 0, 1), (1, 1, 2)]),
    ],
)
def test_cuts(sizes: list[int], max_rows: int, expected: list[tuple[int, int, int]]):
    assert pieces(sizes, max_rows) == tuple(Piece(*piece) for piece in expected)


@given(st.lists(st.integers(0, 300)), st.integers(1, 80))
def test_pieces_cover_every_cluster_evenly(sizes: list[int], max_rows: int):
    cut = pieces(sizes, max_rows)
    assert [row for piece in cut for row in range(piece.start, piece.stop)] == list(range(sum(sizes)))
    for cluster, size in enumerate(sizes):
        rows = [piece.stop - piece.start for piece in cut if piece.cluster == cluster]
        assert sum(rows) == size
        assert len(rows) == (size + max_rows - 1) // max_rows
        assert not rows or (max(rows) <= max_rows and max(rows) - min(rows) <= 1)
        assert rows == sorted(rows, reverse=True)
