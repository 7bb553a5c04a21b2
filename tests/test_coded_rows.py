"""Rows of keys and values in codes: bytes, errors, and rows that are coded again."""

import pytest
import torch
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.encode_rows_ref import encode_rows
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


def random_rows(count: int, width: int, scale: float) -> Tensor:
    """Rows of many sizes, with zeros, blocks next to nothing beside others, and the largest codes there are."""
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-3, 0, count)[:, None] * scale
    rows[:, :16] *= torch.logspace(-7, 0, count)[:, None]
    rows[3], rows[5, 1:], rows[7] = 0, 0, 448 * rows[7].sign()
    return rows.clamp(-6e4, 6e4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-20, 3e-4, 1.0, 2e4])
@pytest.mark.parametrize("code", RowCode)
def test_decoded_rows_are_coded_to_the_same_bytes(code: RowCode, dtype: torch.dtype, scale: float):
    """Scales are powers of two, so a decoded row is exact in every dtype, and codes to the same bytes again."""
    once = CodedRows.of(random_rows(512, WIDTH, scale).to(dtype), code)
    again = CodedRows.of(once.values(), code)
    assert torch.equal(again.values(), once.values())
    assert torch.equal(again.bytes, once.bytes) or (dtype is torch.float16 and scale < 1)  # small codes: once more


@pytest.mark.parametrize(
    ("width", "dtype"), [(WIDTH, torch.float32), (128, torch.float32), (WIDTH, torch.bfloat16), (128, torch.float16)]
)
@pytest.mark.parametrize("code", RowCode)
def test_the_kernel_makes_the_same_bytes(code: RowCode, width: int, dtype: torch.dtype):
    """On a GPU if there is one, else in Triton's interpreter; rows have every size, and lie apart."""
    pytest.importorskip("triton")
    from tiered.kernels import encode_rows as kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = torch.arange(1, 257)[:, None] / torch.tensor([8.0, 96.0]).repeat(width // 2)  # ties among them
    # The interpreter widens no bfloat16 below the normal numbers as it should.
    scales = (1e-20, 3e-4, 1.0, 2e4) if dtype is torch.bfloat16 else (1e-42, 1e-38, 1e-20, 3e-4, 1.0, 2e4)
    rows = (
        torch.stack([*(random_rows(256, width, scale) for scale in scales), steps, -steps.flip(1)])
        .to(device, dtype)
        .transpose(0, 1)
    )
    rows = rows.flatten(0, 1)
    found, expected = (
        torch.full((len(rows), code.row_bytes(width)), fill, dtype=torch.uint8, device=device) for fill in (0, 7)
    )
    kernel.encode_rows(rows, code, found)
    encode_rows(rows, code, expected)
    assert torch.equal(found, expected)
    kernel.encode_rows(rows[:0], code, found[:0])
