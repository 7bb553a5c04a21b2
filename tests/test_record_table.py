"""Where records lie: which rows belong to which, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered.kernels.record_table import RecordTable
from tiered.kernels.row_base import RowBase


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 28))
def test_rows_belong_to_their_record(rows: list[int], words: int):
    offsets, row_bytes = [1024 * (len(rows) - k) for k in range(len(rows))], 4 * words
    table = RecordTable.build(rows, offsets, row_bytes=row_bytes, device="cpu")
    assert table.total == sum(rows)
    assert table.record_of_row.tolist() == [k for k, count in enumerate(rows) for _ in range(count)]
    expected = [offset + k * row_bytes for offset, count in zip(offsets, rows, strict=True) for k in range(count)]
    assert table.at.tolist() == expected
    # Triton compiles a kernel anew for an address that is no multiple of 16, and these would be by chance.
    parts = [table.at, table.record_of_row]
    assert all(part.storage_offset() * part.element_size() % 16 == 0 for part in parts)


@given(st.lists(st.integers(1, 9), max_size=6))
def test_rows_come_back_from_their_records(rows: list[int]):
    table = RecordTable.build(rows, [256 * (k ^ 1) for k in range(len(rows))], row_bytes=12, device="cpu")
    buffer = torch.full((2048,), 0xA5, dtype=torch.uint8)
    coded = torch.randint(256, (sum(rows), 12), dtype=torch.uint8)
    table.put(coded, buffer)
    assert torch.equal(table.taken(buffer), coded)
    assert [buffer[at : at + 12].tolist() for at in table.at] == coded.tolist()
    inside = torch.zeros(2048, dtype=torch.bool)
    for at in table.at.tolist():
        inside[at : at + 12] = True
    assert (buffer[~inside] == 0xA5).all()


@pytest.mark.parametrize(
    ("rows", "offsets", "row_bytes", "message"),
    [
        ([1, 2], [0], 12, "one offset a record"),
        ([1, 0], [0, 128], 12, "one row or more"),
        ([1], [0], 0, "rows of whole words"),
        ([1], [0], 10, "rows of whole words"),
        ([1], [64], 12, "multiples of 128"),
        ([1], [-128], 12, "multiples of 128"),
        ([11, 1], [0, 128], 12, "records overlap: one ends at byte 132, another begins at byte 128"),
        ([1, 11], [128, 0], 12, "records overlap"),
        ([1, 1], [128, 128], 12, "records overlap"),
    ],
)
def test_refused(rows: list[int], offsets: list[int], row_bytes: int, message: str):
    with pytest.raises(ValueError, match=message):
        RecordTable.build(rows, offsets, row_bytes=row_bytes, device="cpu")


BYTES = torch.zeros(512, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("buffer", "rows", "base", "message"),
    [
        (BYTES[:279], 3, None, "cannot hold records up to byte 280"),
        (BYTES.view(torch.int8), 3, None, "torch.int8"),
        (BYTES.view(2, 256), 3, None, r"\(2, 256\)"),
        (torch.zeros(1024, dtype=torch.uint8)[::2], 3, None, r"strides \(2,\)"),
        (BYTES[8:], 3, None, "multiples of 16 are allowed"),
        (BYTES, 2, None, "2 rows do not fit the 3 of the table"),
        (BYTES, 4, None, "4 rows do not fit the 3 of the table"),
        (BYTES, 3, RowBase(torch.ones(3, 16), torch.zeros(2).long()), r"bases of \(2,\) rows do not fit the 3"),
    ],
)
def test_what_does_not_fit(buffer: torch.Tensor, rows: int, base: RowBase | None, message: str):
    table = RecordTable.build([1, 2], [0, 256], row_bytes=12, device="cpu")
    with pytest.raises(ValueError, match=message):
        table.check(buffer, rows, base)


def test_what_just_fits():
    table = RecordTable.build([1, 2], [0, 256], row_bytes=12, device="cpu")
    table.check(BYTES[:280], 3, RowBase(torch.ones(3, 16), torch.zeros(3).long()))
    table.check(BYTES, 4, None, least=True)
