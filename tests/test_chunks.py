"""Chunks of a layer: which columns touch and cover them, and which bytes move between a home and a slot."""

import random

import numpy as np
import pytest

from tiered.forward import chunks as chunks_module
from tiered.forward.chunks import Chunks

ROW = 8


def copied(chunks: Chunks, segments: list, columns: np.ndarray) -> None:
    """The segments bring exactly the bytes of `columns`, each of a sequence to its place."""
    shape = (chunks.sequences, chunks.heads, chunks.columns, ROW)
    home, slot = np.arange(np.prod(shape)), np.full(np.prod(shape), -1)
    for at, to, size in segments:
        assert size > 0 and (slot[to : to + size] == -1).all()
        slot[to : to + size] = home[at : at + size]
    expected = np.full(shape, -1)
    for sequence, of in enumerate(columns):
        expected[sequence][:, of] = home.reshape(shape)[chunks.homes[sequence]][:, of]
    assert (slot.reshape(shape) == expected).all()


@pytest.mark.parametrize("seed", range(60))
def test_the_books_are_those_of_every_column(seed: int, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(seed)
    monkeypatch.setattr(chunks_module, "GAP_BYTES", draw.choice([0, 3 * ROW, 1 << 20]))
    chunks = Chunks(draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 50), ROW, draw.choice([1, 4, 16]))
    if draw.random() < 0.5:
        chunks.keep(sorted(draw.sample(range(chunks.sequences), draw.randint(1, chunks.sequences))))
    count = draw.randint(1, len(chunks.homes))
    share = draw.choice([0.05, 0.5, 0.95, 1.0])
    columns = np.array([[draw.random() < share for _ in range(chunks.columns)] for _ in range(count)])
    touched, covered = chunks.touched(columns), chunks.covered(columns)
    for sequence, home in enumerate(chunks.homes):
        for chunk in range(chunks.each):
            own = columns[sequence, chunk * chunks.chunk_rows :][: chunks.chunk_rows] if sequence < count else [False]
            part = home * chunks.each + chunk
            assert (touched[part], covered[part]) == (any(own), all(own))
    assert touched.sum() <= count * chunks.each and not (covered & ~touched).any()
    copied(chunks, chunks.segments_of(columns), columns)
    copied(chunks, chunks.segments(touched), chunks.columns_of(touched, len(chunks.homes)))
    joined = chunks.joined(columns, touched)
    assert not (columns & ~joined).any() and not (joined & ~chunks.columns_of(touched, count)).any()
    assert len(chunks.runs(joined)) <= len(chunks.runs(columns))


def test_a_layer_that_was_written_in_full_is_one_copy_and_a_span_one_a_head():
    chunks = Chunks(3, 4, 40, ROW, 16)
    assert len(chunks.segments(chunks.of(3))) == len(chunks.segments(chunks.of(2))) == 1
    span = np.zeros((2, 40), dtype=bool)
    span[:, 10:13] = True
    assert [size for *_, size in chunks.segments_of(span)] == 8 * [3 * ROW]
    chunks.keep([0, 2])
    assert len(chunks.segments(chunks.of(2))) == 2


def test_short_gaps_are_copied_with_their_neighbours():
    chunks, columns = Chunks(2, 1, 64, ROW, 16), np.zeros((2, 64), dtype=bool)
    columns[:, [0, 4, 60]] = True
    columns[1, 63] = True
    gap = chunks_module.GAP_BYTES // ROW
    assert gap > 64
    joined = chunks.joined(columns, chunks.touched(columns))
    assert [run[2:] for run in chunks.runs(joined)] == [
        (0, 16),
        (48, 61),
        (0, 16),
        (48, 64),
    ]  # chunks between are not there
