"""Where records lie: which rows belong to which, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered.kernels.record_layout import Nvfp4Layout
from tiered.kernels.record_table import RecordTable
from tiered.offload.codec_bytes import codec_bytes


@given(st.integers(1, 300), st.integers(1, 600), st.booleans())
def test_a_records_parts_follow_each_other_and_are_aligned(rows: int, width: int, delta: bool):
    layout = Nvfp4Layout(rows, width, delta)
    assert 16 * (layout.groups - 1) < width <= 16 * layout.groups
    assert layout.record_scale == rows * 8 * layout.groups
    assert layout.record_scale % 4 == 0
    assert layout.projections == layout.record_scale + 4
    assert layout.block_scales == layout.projections + (2 * rows if delta else 0)
    assert layout.nbytes == layout.block_scales + rows * layout.groups
    assert layout.nbytes == codec_bytes("nvfp4_delta" if delta else "nvfp4", rows, width, element_bytes=2)


@given(st.lists(st.integers(1, 9), max_size=6))
def test_rows_belong_to_their_record(rows: list[int]):
    table = RecordTable.build(rows, [1024 * k for k in range(len(rows))], width=16, delta=True, device="cpu")
    assert table.total == sum(rows)
    assert table.record_of_row.tolist() == [k for k, count in enumerate(rows) for _ in range(count)]
    assert table.starts.tolist() == [sum(rows[:k]) for k in range(len(rows) + 1)]
    assert table.at.tolist() == list(table.offsets) == [1024 * k for k in range(len(rows))]
    # Triton compiles a kernel anew for an address that is no multiple of 16, and these would be by chance.
    parts = [table.starts, table.at, table.record_of_row]
    assert all(part.storage_offset() * part.element_size() % 16 == 0 for part in parts)


@pytest.mark.parametrize(
    ("rows", "offsets", "width", "message"),
    [
        ([1, 2], [0], 16, "one offset a record"),
        ([1, 0], [0, 128], 16, "one row or more"),
        ([1], [0], 0, "a positive width"),
        ([1], [64], 16, "multiples of 128"),
        ([1], [-128], 16, "multiples of 128"),
        ([15, 1], [0, 128], 16, "records overlap: one ends at byte 139, another begins at byte 128"),
        ([1, 15], [128, 0], 16, "records overlap"),
        ([85, 1], [0, 768], 16, "one ends at byte 769"),
        ([1, 1], [128, 128], 16, "records overlap"),
    ],
)
def test_refused(rows: list[int], offsets: list[int], width: int, message: str):
    with pytest.raises(ValueError, match=message):
        RecordTable.build(rows, offsets, width=width, delta=False, device="cpu")


def test_records_may_touch_and_stand_in_any_order():
    # 28 rows of one group: 224 bytes of codes, 4 of scale and 28 of block scales, 256 in all.
    table = RecordTable.build([1, 28], [256, 0], width=16, delta=False, device="cpu")
    table.check(torch.zeros(256 + 13, dtype=torch.uint8), None, None)


BYTES = torch.zeros(512, dtype=torch.uint8)
CENTROIDS, INDEX = torch.ones(3, 32), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("delta", "buffer", "centroids", "index", "message"),
    [
        (True, BYTES[:299], CENTROIDS, INDEX, "cannot hold records up to byte 300"),
        (True, BYTES.view(torch.int8), CENTROIDS, INDEX, "torch.int8"),
        (True, BYTES.view(2, 256), CENTROIDS, INDEX, r"\(2, 256\)"),
        (True, torch.zeros(1024, dtype=torch.uint8)[::2], CENTROIDS, INDEX, r"strides \(2,\)"),
        (True, BYTES[8:], CENTROIDS, INDEX, "multiples of 16 are allowed"),
        (True, BYTES, None, None, "both with delta records"),
        (True, BYTES, CENTROIDS, None, "both with delta records"),
        (False, BYTES, CENTROIDS, INDEX, "none with others"),
        (False, BYTES, None, INDEX, "none with others"),
        (True, BYTES, CENTROIDS[:, :16], INDEX, r"centroids \(3, 16\) do not fit rows of width 32"),
        (True, BYTES, CENTROIDS, INDEX[:1], r"centroid_of_record \(1,\) does not fit 2 records"),
    ],
)
def test_a_buffer_or_centroids_that_do_not_fit(delta, buffer, centroids, index, message: str):
    table = RecordTable.build([1, 2], [0, 256], width=32, delta=delta, device="cpu")
    with pytest.raises(ValueError, match=message):
        table.check(buffer, centroids, index)


def test_a_buffer_just_long_enough():
    # The second record: 2 rows of 2 groups, 32 + 4 + 4 + 4 = 44 bytes from 256.
    table = RecordTable.build([1, 2], [0, 256], width=32, delta=True, device="cpu")
    table.check(BYTES[:300], CENTROIDS, INDEX)
