"""Rows to bytes and back in every codec."""

import pytest
import torch
from allocations import Allocations
from torch import Tensor

from tiered.kernels.row_base import RowBase
from tiered.offload.codec_bytes import Codec
from tiered.offload.codecs import decode, encode

NUMBERS, ROOM, WIDTH = torch.tensor([9, 10, 11, 0, 3, 2, 14, 5, 6, 7, 15]), 17, 40  # out of order, with gaps between
CLUSTERS = [1, 1, 1, 0, *[1] * 7]  # of each row


def base_of(codec: Codec, centroids: Tensor) -> RowBase | None:
    return RowBase(centroids, torch.tensor(CLUSTERS)) if codec.needs_base else None


def encoded(codec: Codec, rows: Tensor, centroids: Tensor, standing: int = 0xA5) -> Tensor:
    """The rows in a buffer of `ROOM` rows, which held `standing` before."""
    buffer = torch.full((ROOM, codec.row_bytes(WIDTH, rows.element_size())), standing, dtype=torch.uint8)
    encode(codec, rows, buffer, NUMBERS, base_of(codec, centroids))
    return buffer


def rows_of(codec: Codec, buffer: Tensor, out: Tensor, centroids: Tensor, places: Tensor | None = None) -> Tensor:
    """`out`, with the rows decoded into its `places`. If `places` is None, they are its first rows."""
    to = torch.arange(len(NUMBERS)) if places is None else places
    decode(codec, buffer, NUMBERS, out, to, base_of(codec, centroids))
    return out


@pytest.fixture
def centroids() -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)) * 5


@pytest.fixture
def rows(centroids: Tensor) -> Tensor:
    return centroids[CLUSTERS] + torch.randn(len(NUMBERS), WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", Codec)
def test_rows_take_their_bytes_and_no_more(codec: Codec, dtype: torch.dtype, rows: Tensor, centroids: Tensor):
    rows, centroids = rows.to(dtype), centroids.to(dtype)
    buffer = encoded(codec, rows, centroids)
    others = torch.ones(ROOM, dtype=torch.bool)
    others[NUMBERS] = False
    assert (buffer[others] == 0xA5).all()
    # And all of them: with other bytes before, the same rows.
    assert torch.equal(encoded(codec, rows, centroids, standing=0)[NUMBERS], buffer[NUMBERS])


# Relative error of Gaussian rows, from and to; of the delta, whose residual is a fifth of the row, a fifth of NVFP4's.
ERRORS = {
    Codec.RAW: (0, 0),
    Codec.FP8: (0.02, 0.03),
    Codec.NVFP4: (0.08, 0.11),
    Codec.NVFP4_DELTA: (0.012, 0.024),
}


@pytest.mark.parametrize("codec", Codec)
def test_the_error_is_that_of_the_format(codec: Codec, rows: Tensor, centroids: Tensor):
    least, most = ERRORS[codec]
    out = rows_of(codec, encoded(codec, rows, centroids), torch.empty_like(rows), centroids)
    assert least <= ((out - rows).norm() / rows.norm()).item() <= most


@pytest.mark.parametrize("codec", Codec)
def test_rows_are_decoded_into_their_places(codec: Codec, rows: Tensor, centroids: Tensor):
    buffer = encoded(codec, rows, centroids)
    plain = rows_of(codec, buffer, torch.empty_like(rows), centroids)
    places = torch.randperm(20, generator=torch.Generator().manual_seed(3))[: len(rows)]
    out = rows_of(codec, buffer, torch.full((20, WIDTH), 7.0), centroids, places)
    assert torch.equal(out[places], plain)
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[places] = False
    assert (out[untouched] == 7).all()


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec.code])
def test_another_dtype_gets_the_rounded_rows(codec: Codec, rows: Tensor, centroids: Tensor):
    buffer = encoded(codec, rows, centroids)
    plain = rows_of(codec, buffer, torch.empty_like(rows), centroids)
    out = rows_of(codec, buffer, torch.empty(len(rows), WIDTH, dtype=torch.bfloat16), centroids)
    assert torch.equal(out, plain.bfloat16())


@pytest.mark.parametrize(
    "rows", [torch.zeros(11, WIDTH), torch.full((11, WIDTH), 1e-42), torch.full((11, WIDTH), 3e38)]
)
@pytest.mark.parametrize("codec", [codec for codec in Codec if not codec.needs_base])
def test_extreme_rows_stay_finite(codec: Codec, rows: Tensor, centroids: Tensor):
    out = rows_of(codec, encoded(codec, rows, centroids), torch.empty_like(rows), centroids)
    assert out.isfinite().all()
    assert torch.allclose(out, rows, rtol=0.07, atol=1e-40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", Codec)
def test_working_memory_is_booked(codec: Codec, dtype: torch.dtype):
    """Beside a copy of the rows' bytes, which lie apart."""
    count, width = 128, 512
    rows, numbers = torch.randn(count, width).to(dtype), torch.arange(count)
    out, row_bytes = torch.empty_like(rows), codec.row_bytes(width, rows.element_size())
    buffer = torch.zeros(count, row_bytes, dtype=torch.uint8)
    base = RowBase(rows[:1].clone(), torch.zeros_like(numbers)) if codec.needs_base else None
    peaks, most = [], count * (width * codec.working + row_bytes)
    for work in (
        lambda: encode(codec, rows, buffer, numbers, base),
        lambda: decode(codec, buffer, numbers, out, numbers, base),
    ):
        with Allocations() as allocated:
            work()
        peaks.append(allocated.peak)
    assert 0.6 * most <= max(peaks) <= most
