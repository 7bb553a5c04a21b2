"""Rows to records and back in every codec."""

import pytest
import torch
from allocations import Allocations
from torch import Tensor

from tiered.offload.codec_bytes import Codec
from tiered.offload.codecs import CODECS

SIZES, OFFSETS, WIDTH = [3, 1, 7], [0, 8192, 3072], 40  # out of order, with gaps between
CLUSTERS = [1, 0, 1]


def records(codec: Codec, rows: Tensor, centroids: Tensor) -> Tensor:
    buffer = torch.full((16384,), 0xA5, dtype=torch.uint8)
    delta = codec.needs_base
    CODECS[codec].encode(rows, SIZES, buffer, OFFSETS, centroids if delta else None, CLUSTERS if delta else None)
    return buffer


def rows_of(codec: Codec, buffer: Tensor, dtype: torch.dtype, out: Tensor, centroids: Tensor, places=None) -> Tensor:
    chosen = centroids[CLUSTERS] if codec.needs_base else None
    CODECS[codec].decode(buffer, OFFSETS, SIZES, dtype, out, places, chosen)
    return out


@pytest.fixture
def centroids() -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)) * 5


@pytest.fixture
def rows(centroids: Tensor) -> Tensor:
    noise = torch.randn(sum(SIZES), WIDTH, generator=torch.Generator().manual_seed(2))
    return centroids[[1] * 3 + [0] + [1] * 7] + noise


def test_every_codec_is_in_the_table():
    assert list(CODECS) == list(Codec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", Codec)
def test_records_take_their_bytes_and_no_more(codec: Codec, dtype: torch.dtype, rows: Tensor, centroids: Tensor):
    rows, centroids = rows.to(dtype), centroids.to(dtype)
    buffer = records(codec, rows, centroids)
    outside = torch.ones(len(buffer), dtype=torch.bool)
    for size, offset in zip(SIZES, OFFSETS, strict=True):
        outside[offset : offset + size * codec.row_bytes(WIDTH, dtype.itemsize)] = False
    assert (buffer[outside] == 0xA5).all()
    # And all of them: with other bytes before, the same record.
    again = torch.zeros_like(buffer)
    delta = codec.needs_base
    CODECS[codec].encode(rows, SIZES, again, OFFSETS, centroids if delta else None, CLUSTERS if delta else None)
    assert torch.equal(again[~outside], buffer[~outside])


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
    out = rows_of(codec, records(codec, rows, centroids), rows.dtype, torch.empty_like(rows), centroids)
    assert least <= ((out - rows).norm() / rows.norm()).item() <= most


@pytest.mark.parametrize("codec", Codec)
def test_rows_go_where_they_are_wanted(codec: Codec, rows: Tensor, centroids: Tensor):
    buffer = records(codec, rows, centroids)
    plain = rows_of(codec, buffer, rows.dtype, torch.empty_like(rows), centroids)
    places = torch.randperm(20, generator=torch.Generator().manual_seed(3))[: len(rows)]
    out = rows_of(codec, buffer, rows.dtype, torch.full((20, WIDTH), 7.0), centroids, places)
    assert torch.equal(out[places], plain)
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[places] = False
    assert (out[untouched] == 7).all()


@pytest.mark.parametrize("codec", Codec)
def test_another_dtype_gets_the_rounded_rows(codec: Codec, rows: Tensor, centroids: Tensor):
    buffer = records(codec, rows, centroids)
    plain = rows_of(codec, buffer, rows.dtype, torch.empty_like(rows), centroids)
    out = rows_of(codec, buffer, rows.dtype, torch.empty(len(rows), WIDTH, dtype=torch.bfloat16), centroids)
    assert torch.equal(out, plain.bfloat16())


@pytest.mark.parametrize(
    "rows", [torch.zeros(11, WIDTH), torch.full((11, WIDTH), 1e-42), torch.full((11, WIDTH), 3e38)]
)
@pytest.mark.parametrize("codec", [codec for codec in Codec if not codec.needs_base])
def test_extreme_rows_stay_finite(codec: Codec, rows: Tensor, centroids: Tensor):
    out = rows_of(codec, records(codec, rows, centroids), rows.dtype, torch.empty_like(rows), centroids)
    assert out.isfinite().all()
    assert torch.allclose(out, rows, rtol=0.07, atol=1e-40)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", Codec)
def test_what_is_at_work_is_booked(codec: Codec, dtype: torch.dtype, placed: bool):
    count, width = 128, 512
    rows, places = torch.randn(count, width).to(dtype), torch.arange(count) if placed else None
    out = torch.empty_like(rows)
    buffer = torch.zeros(count * codec.row_bytes(width, 4), dtype=torch.uint8)
    base = (rows[:1].clone(), [0]) if codec.needs_base else (None, None)
    for work in (
        lambda: CODECS[codec].encode(rows, [count], buffer, [0], *base),
        lambda: CODECS[codec].decode(buffer, [0], [count], dtype, out, places, base[0]),
    ):
        with Allocations() as allocated:
            work()
        assert allocated.peak <= count * width * codec.working
