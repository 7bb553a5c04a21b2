"""Rows of keys and values in codes: bytes, errors, and that each goes through any number of times."""

import pytest
import torch

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_code import RowCode

WIDTH = 40


@pytest.mark.parametrize(("code", "elements", "words"), [("fp8", 128, 33), ("nvfp4", 128, 19), ("nvfp4", 40, 7)])
def test_a_row_is_whole_words(code: str, elements: int, words: int):
    assert RowCode(code).row_bytes(elements) == 4 * words
    assert CodedRows.of(torch.randn(2, 3, elements), RowCode(code)).bytes.shape == (2, 3, 4 * words)


@pytest.mark.parametrize(("code", "least", "most"), [(RowCode.FP8, 0.02, 0.03), (RowCode.NVFP4, 0.08, 0.11)])
def test_the_error_is_that_of_the_format(code: RowCode, least: float, most: float):
    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    assert least < float((CodedRows.of(rows, code).values() - rows).norm() / rows.norm()) < most


@pytest.mark.parametrize("code", RowCode)
def test_a_slice_is_that_of_the_values(code: RowCode):
    rows = CodedRows.of(torch.randn(2, 4, 6, WIDTH), code)
    part = rows[:, 1:2, 2:5]
    assert part.shape == (2, 1, 3, WIDTH)
    assert torch.equal(part.values(), rows.values()[:, 1:2, 2:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-20, 3e-4, 1.0, 2e4])
@pytest.mark.parametrize("code", RowCode)
def test_rows_go_through_any_number_of_times(code: RowCode, dtype: torch.dtype, scale: float):
    """Scales are powers of two: what comes back is exact in every dtype, and makes the same bytes again."""
    generator, count = torch.Generator().manual_seed(0), 512
    rows = torch.randn(count, WIDTH, generator=generator) * torch.logspace(-3, 0, count)[:, None] * scale
    rows[:, :16] *= torch.logspace(-7, 0, count)[:, None]  # blocks next to nothing beside others
    rows[3], rows[5, 1:], rows[7] = 0, 0, 448 * rows[7].sign()
    once = CodedRows.of(rows.clamp(-6e4, 6e4).to(dtype), code)
    again = CodedRows.of(once.values(), code)
    assert torch.equal(again.values(), once.values())
    assert torch.equal(again.bytes, once.bytes) or (dtype is torch.float16 and scale < 1)  # small codes: once more
