"""NVFP4 encode and decode: bytes against torchao's and against rounding by definition, edges, and quality in dB. The
Triton kernels of rows write and read the same."""

import importlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tiered.kernels.decode_rows_ref import decode_groups
from tiered.kernels.encode_rows_ref import E2M1_MAX, E4M3_MAX, E4M3_MIN, SCALE_MIN, encode_groups, scale_to
from tiered.kernels.row_code import RowCode

CUDA = torch.cuda.is_available()
FLOAT_MAX = torch.finfo(torch.float32).max
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [(code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(127)]


def nvfp4_encode(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return encode_groups(values.float(), scale, E4M3_MIN)


def nvfp4_decode(codes: Tensor, block_scales: Tensor, scale: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return decode_groups(codes, block_scales, scale)[:, :width].to(dtype)


def nvfp4_scale(amax: Tensor) -> Tensor:
    return scale_to(E2M1_MAX * E4M3_MAX, amax)


def one_scale(values: Tensor) -> Tensor:
    """The scale of `values` as one tensor, for each of its rows."""
    return nvfp4_scale(values.abs().amax().float()).expand(len(values))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(n: int = 40, width: int = 64) -> Tensor:
    return torch.randn(n, width, generator=seeded())


def student_t2() -> Tensor:
    return gaussian() / torch.empty(40, 64).exponential_(generator=seeded(1)).sqrt()


def zero_blocks() -> Tensor:
    values = gaussian()
    values[3] = 0
    values[:, 16:32] = 0
    return values


def largest() -> Tensor:
    values = gaussian() * 1e38
    values[0, 0], values[7, 63] = FLOAT_MAX, -FLOAT_MAX
    return values.clamp(-FLOAT_MAX, FLOAT_MAX)


def ties() -> Tensor:
    """On the grid of 0.25, with blocks whose scale is a power of two."""
    values = torch.randint(-24, 25, (40, 64), generator=seeded()) * 0.25
    values[:, ::16] = 6
    values[0, 0] = 6 * 448  # the scale of all is 1
    return values


# Input kinds, and whether each has blocks below 2^-6 of the largest, where torchao's scales stop.
KINDS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "gaussian": (gaussian, False),
    "bfloat16": (lambda: gaussian().bfloat16(), False),
    "integers": (lambda: torch.randint(-100, 101, (40, 64), generator=seeded()).float(), False),
    "student t": (student_t2, False),
    "cauchy": (lambda: torch.empty(40, 64).cauchy_(generator=seeded()), False),
    "lognormal": (lambda: torch.empty(40, 64).log_normal_(0, 4, generator=seeded()), True),
    "zero blocks": (zero_blocks, True),
    "minus zero": (lambda: torch.where(torch.rand(40, 64, generator=seeded()) < 0.3, -0.0, gaussian()), False),
    "largest float32": (largest, False),
    "1e-30": (lambda: gaussian() * 1e-30, False),
    "rows from 1e-12 to 1e4": (lambda: gaussian() * torch.logspace(-12, 4, 40)[:, None], True),
    "ties": (ties, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_torchaos(kind: str):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    make, small_blocks = KINDS[kind]
    values = make()
    theirs_scale = per_tensor_amax_to_scale(values.abs().amax())
    assert torch.equal(one_scale(values), theirs_scale.expand(len(values)))
    theirs_scales, theirs = nvfp4_quantize(values, per_tensor_scale=theirs_scale)
    codes, block_scales = nvfp4_encode(values, one_scale(values))

    normal = block_scales >= 8  # 2^-6 and more
    assert normal.all() != small_blocks
    assert normal.any()
    assert torch.equal(block_scales.clamp(min=8), theirs_scales.view(torch.uint8))
    assert torch.equal(codes.view(40, -1, 8)[normal], theirs.view(40, -1, 8)[normal])


def test_small_blocks_are_nearer_than_torchaos():
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    values = torch.cat([gaussian(1), gaussian(8) * 1e-5])
    scale = one_scale(values)
    theirs_scales, theirs = nvfp4_quantize(values, per_tensor_scale=scale[0])
    ours = nvfp4_decode(*nvfp4_encode(values, scale), scale, 64, torch.float32)
    other = nvfp4_decode(theirs, theirs_scales.view(torch.uint8), scale, 64, torch.float32)
    assert (ours - values)[1:].norm() < 0.7 * (other - values)[1:].norm()


def nearest(value: float, values: list[float]) -> int:
    """The code of the nearest number, the even one of two that are as near; exact, since both are short floats."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - value), code % 2))


def around_the_midpoints(values: list[float], step: float) -> list[float]:
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    return [middle * factor for middle in middles for factor in (1 - step, 1, 1 + step)] + values


def test_codes_round_to_nearest_even():
    wanted = around_the_midpoints(E2M1, 2.0**-20)
    wanted += [-value for value in wanted]
    wanted += [0.0] * (-len(wanted) % 15)
    values = torch.tensor(wanted).view(-1, 15)
    values = torch.cat([values, torch.full((len(values), 1), 6.0)], dim=1)  # every block has the scale 1
    codes, block_scales = nvfp4_encode(values, torch.ones(len(values)))
    assert (block_scales == E4M3.index(1.0)).all()
    nibbles = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    expected = [[nearest(abs(v), E2M1) + 8 * (np.signbit(v)) for v in row] for row in values.tolist()]
    assert nibbles.tolist() == expected


def test_block_scales_round_to_nearest_even():
    wanted = [*around_the_midpoints(E4M3[1:], 2.0**-20), 0.0, 2.0**-12, 449.0, 1e30]
    values = torch.zeros(len(wanted), 16)
    values[:, 5] = 6 * torch.tensor(wanted)
    _, block_scales = nvfp4_encode(values, torch.ones(len(wanted)))
    expected = [nearest(min(max(value, 2.0**-9), 448.0), E4M3) for value in wanted]
    assert block_scales.flatten().tolist() == expected


@pytest.mark.parametrize("scale", [0.3, 1 / 3, 0.7e-9])
def test_block_scales_divide_in_torchaos_order(scale: float):
    """A few bits around each midpoint of E4M3, under scales that round: any other order of divisions shows."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    normal = E4M3[8:]
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(normal)])
    amax = (middles * 6 * scale).view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)
    values = torch.zeros(13, 81 * 16)  # 1053 blocks, of 118 · 9 = 1062
    values.view(13, 81, 16)[..., 3] = amax.view(torch.float32).flatten()[:1053].view(13, 81)
    _, block_scales = nvfp4_encode(values, torch.full((13,), scale))
    theirs, _ = nvfp4_quantize(values, per_tensor_scale=torch.tensor(scale))
    assert torch.equal(block_scales, theirs.view(torch.uint8))


def test_every_code_and_scale_decodes():
    """All 256 bytes of codes under all 127 block scales, with a scale that rounds."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 32, 8).expand(127, 32, 8).reshape(127, 256)
    block_scales = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32)
    scale = torch.full((127,), 0.3)
    values = np.array(E2M1 + [-value for value in E2M1], dtype=np.float32)
    byte = np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=1).reshape(1, 512)
    expected = pairs * (np.float32(0.3) * np.array(E4M3, dtype=np.float32))[:, None]
    decoded = nvfp4_decode(codes, block_scales, scale, 512, torch.float32).numpy()
    assert np.array_equal(decoded.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("width", [1, 15, 17, 40])
def test_a_row_is_padded_with_zeros(width: int):
    values = gaussian(5)[:, :width]
    padded = torch.zeros(5, -(-width // 16) * 16)
    padded[:, :width] = values
    scale = one_scale(values)
    codes, block_scales = nvfp4_encode(values, scale)
    expected = nvfp4_encode(padded, scale)
    assert torch.equal(codes, expected[0]) and torch.equal(block_scales, expected[1])
    decoded = nvfp4_decode(codes, block_scales, scale, width, torch.float32)
    assert torch.equal(decoded, nvfp4_decode(*expected, scale, padded.shape[1], torch.float32)[:, :width])


def test_every_row_has_its_own_scale():
    values = gaussian(9) * torch.logspace(-3, 3, 9)[:, None]
    scale = nvfp4_scale(values.abs().amax(1))
    codes, block_scales = nvfp4_encode(values, scale)
    decoded = nvfp4_decode(codes, block_scales, scale, 64, torch.float32)
    for row in range(9):
        part = slice(row, row + 1)
        alone = nvfp4_encode(values[part], scale[part])
        assert torch.equal(codes[part], alone[0]) and torch.equal(block_scales[part], alone[1])
        assert torch.equal(decoded[part], nvfp4_decode(*alone, scale[part], 64, torch.float32))


def test_zeros():
    values = torch.zeros(3, 32)
    values[1, 4] = -0.0
    assert one_scale(values).tolist() == [1, 1, 1]
    codes, block_scales = nvfp4_encode(values, one_scale(values))
    assert (block_scales == 1).all()  # 2^-9
    assert codes.flatten().tolist() == [0] * 18 + [8] + [0] * 29
    decoded = nvfp4_decode(codes, block_scales, one_scale(values), 32, torch.float32)
    assert torch.equal(decoded, values) and torch.equal(decoded.signbit(), values.signbit())


@pytest.mark.parametrize("amax", [1e-32, 2.0**-126, 1e-40, 2.0**-149])
def test_tiny_values(amax: float):
    values = gaussian(4)
    values = values / values.abs().amax() * amax
    scale = one_scale(values)
    assert (scale == SCALE_MIN).all()
    decoded = nvfp4_decode(*nvfp4_encode(values, scale), scale, 64, torch.float32)
    # A quarter of a step of the smallest block, or a sixth of the largest value that its block has.
    bound = max(SCALE_MIN * 2.0**-9 / 4, amax / 6)
    assert ((decoded.double() - values.double()).abs() <= bound).all()


def test_the_largest_numbers_stay_finite():
    values = largest()
    scale = one_scale(values)
    decoded = nvfp4_decode(*nvfp4_encode(values, scale), scale, 64, torch.float32)
    assert decoded.isfinite().all()
    assert sqnr(values / 1e38, decoded / 1e38) > 18


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite(value: float):
    values = gaussian(5)
    values[3, 50] = value
    assert not nvfp4_scale(values.abs().amax()).isfinite()


def sqnr(values: Tensor, decoded: Tensor) -> float:
    """Signal over quantisation noise in dB."""
    values, noise = values.double(), decoded.double() - values.double()
    return float(10 * torch.log10(values.square().sum() / noise.square().sum()))


@pytest.mark.parametrize("kind", ["gaussian", "bfloat16", "1e-30"])
def test_quality(kind: str):
    """An error of 9.5 % of the norm is 20.4 dB."""
    values = KINDS[kind][0]()
    scale = one_scale(values)
    decoded = nvfp4_decode(*nvfp4_encode(values, scale), scale, 64, torch.float32)
    assert sqnr(values, decoded) == pytest.approx(20.4, abs=0.25)


def halves() -> Tensor:
    """Codes at, and next to, every midpoint of E2M1, under the scales 1 of blocks; then blocks whose scales are at, and
    next to, every midpoint of E4M3."""
    codes = around_the_midpoints(E2M1, 2.0**-20)
    codes += [-value for value in codes]
    values = torch.tensor(codes + [0.0] * (-len(codes) % 15)).view(-1, 15)
    values = torch.cat([values, torch.full((len(values), 1), 6.0)], dim=1)
    scales = torch.tensor(around_the_midpoints(E4M3[1:], 2.0**-20))
    blocks = torch.zeros(len(scales), 16)
    blocks[:, 5] = 6 * scales
    flat = torch.cat([values, blocks]).flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % 512)).view(-1, 512)


@pytest.mark.parametrize("kind", [*KINDS, "midpoints"])
def test_triton_writes_and_reads_the_same_bytes(kind: str):
    """As rows in the code nvfp4, whose scales are powers of two; on the GPU if there is one, else interpreted."""
    pytest.importorskip("triton")
    values = halves() if kind == "midpoints" else KINDS[kind][0]()
    device = "cuda" if CUDA else "cpu"
    coded, rows = [], []
    for suffix, where in (("_ref", "cpu"), ("", device)):
        encode, decode = (importlib.import_module(f"tiered.kernels.{way}_rows{suffix}") for way in ("encode", "decode"))
        there = torch.empty(len(values), RowCode.NVFP4.row_bytes(values.shape[1]), dtype=torch.uint8, device=where)
        encode.encode_rows(values.to(where), RowCode.NVFP4, there)
        out = torch.empty(values.shape, device=where)
        decode.decode_rows(there, RowCode.NVFP4, out)
        coded.append(there.cpu())
        rows.append(out.cpu())
    assert torch.equal(*coded) and torch.equal(*rows)


def test_triton_reads_rows_of_whole_words():
    pytest.importorskip("triton")
    from tiered.kernels import decode_rows

    coded = torch.zeros(1 + RowCode.NVFP4.row_bytes(16), dtype=torch.uint8)[1:].view(1, -1)
    with pytest.raises(ValueError, match="nvfp4 must begin at multiples of 4 bytes"):
        decode_rows.decode_rows(coded, RowCode.NVFP4, torch.empty(1, 16))
