"""Rows against naive loops: which columns they read and write, and that invalid ones leave no trace."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiered.core.rows import Rows, parts_of
from tiered.kernels.scatter_rows_ref import scatter_rows

HEADS, ELEMENTS = 2, 3


@dataclass
class Case:
    """Rows, and what they mean: the column of every row, and whether it may be written, as lists by sequence."""

    rows: Rows
    length: int
    columns: list[list[int]]
    valid: list[list[bool]]

    @property
    def batch(self) -> int:
        return len(self.columns)


@st.composite
def cases(draw: st.DrawFn, *, spans: bool = True) -> Case:
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    count = draw(st.integers(1, length))
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    valid = draw(st.none() | st.lists(flags, min_size=batch, max_size=batch))
    meant = valid or [[True] * count] * batch
    flag_tensor = None if valid is None else torch.tensor(valid)
    if spans and draw(st.booleans()):
        start = draw(st.integers(0, length - count))
        rows = replace(Rows.span(start, start + count), valid=flag_tensor)
        return Case(rows, length, [list(range(start, start + count))] * batch, meant)
    columns = [draw(st.permutations(range(length)))[:count] for _ in range(batch)]
    for row, kept in zip(columns, meant, strict=True):
        for i in range(count):
            if not kept[i]:  # the column of an invalid row may be any, one that another row writes too
                row[i] = draw(st.integers(0, length - 1))
    return Case(Rows.at(torch.tensor(columns), flag_tensor), length, columns, meant)


def numbered(batch: int, length: int) -> Tensor:
    """A store in which every entry is another number."""
    return torch.arange(batch * HEADS * length * ELEMENTS, dtype=torch.float32).view(batch, HEADS, length, ELEMENTS)


def written(case: Case, target: Tensor, values: Tensor) -> Tensor:
    """`target` after `values` have been put, entry by entry."""
    result = target.clone()
    for b in range(case.batch):
        for r, column in enumerate(case.columns[b]):
            if case.valid[b][r]:
                result[b, :, column] = values[b, :, r]
    return result


@given(cases())
def test_take_and_columns(case: Case):
    source = numbered(case.batch, case.length)
    expected = torch.stack([source[b][:, columns] for b, columns in enumerate(case.columns)])
    assert torch.equal(case.rows.take(source), expected)
    ids = torch.arange(case.batch * case.length).view(case.batch, -1)
    assert case.rows.columns(ids).tolist() == [ids[b, columns].tolist() for b, columns in enumerate(case.columns)]


@given(cases())
def test_one_source_stands_for_every_sequence(case: Case):
    source = numbered(1, case.length)
    expected = torch.stack([source[0][:, columns] for columns in case.columns])
    assert torch.equal(case.rows.take(source).expand_as(expected), expected)


@given(cases())
def test_put(case: Case):
    values = -1 - numbered(case.batch, case.rows.count)
    target = numbered(case.batch, case.length)
    expected = written(case, target, values)
    case.rows.put(target, values)
    assert torch.equal(target, expected)


@given(cases())
def test_put_into_a_view(case: Case):
    """The store hands out one layer of many, and only some of its sequences."""
    stored = torch.full((3, case.batch + 1, HEADS, case.length, ELEMENTS), -7.0)
    stored[1, : case.batch] = numbered(case.batch, case.length)
    values = -1 - numbered(case.batch, case.rows.count)
    expected = stored.clone()
    expected[1, : case.batch] = written(case, stored[1, : case.batch], values)
    case.rows.put(stored[1, : case.batch], values)
    assert torch.equal(stored, expected)


@given(cases(spans=False))
def test_scatter_rows(case: Case):
    values = -1 - numbered(case.batch, case.rows.count)
    target = numbered(case.batch, case.length)
    expected = written(case, target, values)
    index, given_values = case.rows.index.clone(), values.clone()
    scatter_rows(target, values, case.rows.index, case.rows.valid)
    assert torch.equal(target, expected)
    assert torch.equal(case.rows.index, index) and torch.equal(values, given_values)


def test_a_value_that_is_nowhere_valid_is_nowhere():
    """Not even NaN from a row that waits gets into the store; the index repeats a column that a valid row writes."""
    target = numbered(3, 4)
    before = target.clone()
    values = torch.full((3, HEADS, 3, ELEMENTS), torch.nan)
    values[0, :, 1] = -1.0
    valid = torch.tensor([[False, True, False], [False, False, False], [False, False, False]])
    scatter_rows(target, values, torch.tensor([[2, 2, 2], [0, 0, 3], [1, 2, 3]]), valid)
    assert (target[0, :, 2] == -1).all()
    assert torch.equal(target[0, :, [0, 1, 3]], before[0, :, [0, 1, 3]])
    assert torch.equal(target[1:], before[1:])


@given(cases(), st.integers(1, 9))
def test_parts_are_the_whole(case: Case, size: int):
    values = -1 - numbered(case.batch, case.rows.count)
    source, target = numbered(case.batch, case.length), numbered(case.batch, case.length)
    parts = parts_of(case.rows.count, size)
    assert [row for part in parts for row in range(case.rows.count)[part]] == list(range(case.rows.count))
    assert all(part.stop - part.start == size for part in parts[:-1])
    assert 0 < parts[-1].stop - parts[-1].start <= size
    taken = torch.cat([case.rows[part].take(source) for part in parts], dim=2)
    assert torch.equal(taken, case.rows.take(source))
    for part in parts:
        case.rows[part].put(target, values[:, :, part])
    assert torch.equal(target, written(case, numbered(case.batch, case.length), values))


@given(cases(), st.data())
def test_only(case: Case, data: st.DataObject):
    flags = data.draw(st.lists(st.booleans(), min_size=case.batch, max_size=case.batch))
    rows = case.rows.only(torch.tensor(flags)[:, None])
    valid = [[v and flag for v in row] for row, flag in zip(case.valid, flags, strict=True)]
    here = Case(rows, case.length, case.columns, valid)
    values, target = -1 - numbered(case.batch, rows.count), numbered(case.batch, case.length)
    expected = written(here, target, values)
    rows.put(target, values)
    assert torch.equal(target, expected)
    assert torch.equal(rows.take(target), case.rows.take(target))  # they are still computed


@given(cases())
def test_doubled(case: Case):
    twice = Case(case.rows.doubled(), case.length, case.columns * 2, case.valid * 2)
    values, target = -1 - numbered(twice.batch, case.rows.count), numbered(twice.batch, case.length)
    expected = written(twice, target, values)
    twice.rows.put(target, values)
    assert torch.equal(target, expected)
    assert torch.equal(twice.rows.take(target)[case.batch :], case.rows.take(target[case.batch :]))


@pytest.mark.parametrize("rows", [Rows.span(2, 5), Rows.at(torch.tensor([[2, 3, 4]]))], ids=["span", "index"])
def test_slices(rows: Rows):
    ids = torch.arange(8)[None]
    assert rows.count == 3
    for part, columns in [
        (slice(0, 3), [2, 3, 4]),
        (slice(1, 2), [3]),
        (slice(1, None), [3, 4]),
        (slice(-1, None), [4]),
        (slice(0, 99), [2, 3, 4]),
        (slice(2, 2), []),
    ]:
        assert rows[part].count == len(columns)
        assert rows[part].columns(ids).tolist() == [columns]


def test_a_span_is_a_view():
    source = numbered(2, 5)
    assert Rows.span(1, 3).take(source).data_ptr() == source[:, :, 1:].data_ptr()
