"""Rows in codes at numbered rows of a buffer: their bytes, the way back, and that nothing beside them is touched."""

import importlib
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tiered.kernels import row_code
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import RowCode

CUDA = torch.cuda.is_available()
UNTOUCHED = 0xA5  # what buffers are filled with
SPARE = 5  # rows of a buffer that no row is encoded to

# Lanes without a row divide zero by zero, in numpy with a warning.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


class Case:
    """Rows at numbers of a buffer, not in their order and with gaps; bases that repeat, one of them unused."""

    def __init__(
        self, width: int = 48, total: int = 17, *, residual: bool = True, code: RowCode = RowCode.NVFP4
    ) -> None:
        self.width, self.total, self.code = width, total, code
        self.row_bytes = code.row_bytes(width, residual=residual)
        generator = torch.Generator().manual_seed(width + total)
        self.numbers = torch.randperm(total + SPARE, generator=generator)[:total]
        used = -(-total // 4)
        self.base_of_row = [used - row % used for row in range(total)]
        self.bases = torch.randn(used + 1, width, generator=generator).bfloat16() if residual else None
        self.values = torch.randn(total, width, generator=generator) * 0.25
        if self.bases is not None:
            self.values += self.bases.float()[self.base_of_row] * 1.25

    def with_bases(self, dtype: torch.dtype) -> "Case":
        """This case with bases that need all the bits of `dtype`."""
        assert self.bases is not None
        self.bases = (self.bases.float() * 1.1).to(dtype)
        return self

    def coded(self, buffer: Tensor) -> np.ndarray:
        """The bytes of all rows, [total, row_bytes]."""
        return buffer[self.numbers].numpy()

    @property
    def others(self) -> Tensor:
        """Numbers of the buffer's rows that the case does not name."""
        return torch.tensor([row for row in range(self.total + SPARE) if row not in self.numbers.tolist()])

    @property
    def parts(self) -> tuple[int, int]:
        """Begin and end of the scales of groups in an nvfp4 row."""
        groups = -(-self.width // 16)
        return 8 * groups, 9 * groups


class Codec:
    """encode_rows and decode_rows of one implementation, for tensors on the CPU."""

    def __init__(self, suffix: str, device: str) -> None:
        self.device, self.suffix = device, suffix
        self._encode = importlib.import_module(f"tiered.kernels.encode_rows{suffix}").encode_rows
        self._decode = importlib.import_module(f"tiered.kernels.decode_rows{suffix}").decode_rows

    def encode(self, rows: Tensor, case: Case, standing: int = UNTOUCHED) -> Tensor:
        """The buffer after encoding, which held `standing` before."""
        shape = case.total + SPARE, case.row_bytes
        out = torch.full(shape, standing, dtype=torch.uint8, device=self.device)
        self._encode(rows.to(self.device), case.code, out, case.numbers.to(self.device), self.base(case))
        return out.cpu()

    def decode(self, buffer: Tensor, case: Case, out: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """`out` after decoding into it."""
        there = (torch.empty(case.total, case.width) if out is None else out).to(self.device)
        self.decode_into(there, buffer.to(self.device), case, places)
        return there.cpu()

    def decode_into(self, out: Tensor, buffer: Tensor, case: Case, places: Tensor | None = None) -> None:
        """Decode from `buffer`, where it lies, into `out`, which is on the device."""
        places = None if places is None else places.to(self.device)
        self._decode(buffer, case.code, out, case.numbers.to(self.device), places, self.base(case))

    def base(self, case: Case) -> RowBase | None:
        if case.bases is None:
            return None
        of_row = torch.tensor(case.base_of_row, dtype=torch.int64, device=self.device)
        return RowBase(case.bases.to(self.device), of_row)


REFERENCE, TRITON = ("_ref", "cpu"), ("", "cuda" if CUDA else "cpu")


@pytest.fixture(params=["reference", "triton"])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Both implementations; Triton's on the GPU if there is one, else interpreted."""
    return Codec(*(REFERENCE if request.param == "reference" else TRITON))


CASES = {
    "residual": lambda: Case(),
    "float32 bases": lambda: Case().with_bases(torch.float32),  # their products with projections round
    "plain": lambda: Case(residual=False),
    "fp8": lambda: Case(code=RowCode.FP8, residual=False),
    "fp8, residual": lambda: Case(37, code=RowCode.FP8),
    "width 1": lambda: Case(1),
    "width 37": lambda: Case(37),
    "wide": lambda: Case(1100, 9),
    "one row": lambda: Case(16, 1),
    "many rows": lambda: Case(16, 300),  # of more than one program
}
_ENCODED: dict[tuple[str, str], tuple[Case, Tensor]] = {}  # by implementation and case: interpreting takes its time


def encoded(codec: Codec, name: str) -> tuple[Case, Tensor]:
    """A case, and the buffer with its values; not to be written to."""
    key = codec.suffix, name
    if key not in _ENCODED:
        case = CASES[name]()
        _ENCODED[key] = case, codec.encode(case.values, case)
    return _ENCODED[key]


def naive_decode(case: Case, buffer: Tensor) -> np.ndarray:
    """Rows from the bytes, by the description of the format alone."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    e2m1 = np.concatenate([magnitudes, -magnitudes])
    begin, end = case.parts
    rows = []
    for row, number in zip(case.coded(buffer), case.base_of_row, strict=True):
        if case.code is RowCode.FP8:
            scale = np.float32(2.0) ** (np.float32(row[case.width]) - 127)
            values = torch.from_numpy(row[: case.width].copy()).view(torch.float8_e4m3fn).float().numpy() * scale
        else:
            scale = np.float32(2.0) ** (np.float32(row[end]) - 127)
            codes = row[:begin]
            values = np.stack([e2m1[codes & 15], e2m1[codes >> 4]], axis=1).reshape(-1)
            scales = torch.from_numpy(row[begin:end].copy()).view(torch.float8_e4m3fn).float().numpy()
            values = (values * np.repeat(scale * scales, 16))[: case.width]
        if case.bases is not None:
            bits = row[-2:].copy().view(np.uint16)[0]
            projection = (np.uint32(bits) << np.uint32(16)).view(np.float32)
            values = projection * case.bases[number].float().numpy() + values
        rows.append(values)
    return np.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_decoding_is_the_formats_arithmetic(codec: Codec, name: str):
    case, buffer = encoded(codec, name)
    decoded = codec.decode(buffer, case).numpy()
    assert np.array_equal(decoded.view(np.int32), naive_decode(case, buffer).view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if "fp8" not in name])
def test_rows_are_torchaos_nvfp4_of_the_residual(codec: Codec, name: str, dtype: torch.dtype):
    """Each row is a tensor of torchao's, under a scale that is a power of two."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    case, buffer = encoded(codec, name)
    values = case.values.to(dtype)
    if dtype != torch.float32:
        buffer = codec.encode(values, case)
    begin, end = case.parts
    for row, value, number in zip(case.coded(buffer), values.float(), case.base_of_row, strict=True):
        residual = value
        if case.bases is not None:
            base = case.bases[number].float()
            square = math.fsum(c * c for c in base.tolist())
            along = math.fsum(x * c for x, c in zip(value.tolist(), base.tolist(), strict=True)) / square
            projection = torch.tensor([along]).bfloat16()
            assert torch.equal(torch.from_numpy(row[-2:].copy()).view(torch.bfloat16), projection)
            residual = value - projection.float() * base
        padded = torch.zeros(1, end - begin << 4)
        padded[0, : case.width] = residual
        scale = torch.tensor(2.0) ** (int(row[end]) - 127)
        # Rounded to four bits, the largest block scale is 128 to 240.
        assert 124 <= float(residual.abs().max()) / 6 / scale <= 248 or residual.abs().max() == 0
        theirs_scales, theirs = nvfp4_quantize(padded, per_tensor_scale=scale)
        assert row[begin:end].tolist() == theirs_scales.view(torch.uint8).flatten().tolist()
        assert row[:begin].tolist() == theirs.flatten().tolist()


@pytest.mark.parametrize("name", CASES)
def test_rows_take_the_books_bytes_and_no_other(codec: Codec, name: str):
    case, buffer = encoded(codec, name)
    assert (buffer[case.others] == UNTOUCHED).all()
    # And all of them: what stood there makes no difference.
    assert np.array_equal(case.coded(codec.encode(case.values, case, standing=0)), case.coded(buffer))


@pytest.mark.parametrize("name", CASES)
def test_without_numbers_rows_are_the_first_in_order(codec: Codec, name: str):
    case, buffer = encoded(codec, name)
    wanted, base, device = torch.from_numpy(case.coded(buffer)), codec.base(case), codec.device
    longer = torch.full(buffer.shape, UNTOUCHED, dtype=torch.uint8, device=device)
    codec._encode(case.values.to(device), case.code, longer, base=base)
    assert torch.equal(longer[: case.total].cpu(), wanted)
    assert (longer[case.total :] == UNTOUCHED).all()
    out = torch.full((case.total + 3, case.width), torch.pi, device=device)
    codec._decode(wanted.to(device), case.code, out, base=base)
    assert torch.equal(out[: case.total].cpu(), codec.decode(buffer, case))
    assert (out[case.total :] == torch.pi).all()


@pytest.mark.parametrize("name", CASES)
def test_a_row_depends_on_itself_alone(codec: Codec, name: str):
    """Rows can be rewritten alone, and may lie anywhere."""
    case, buffer = encoded(codec, name)
    for row in range(0, case.total, 1 + case.total // 5):  # a few are enough
        alone = Case(case.width, 1, residual=case.bases is not None, code=case.code)
        alone.bases, alone.base_of_row = case.bases, [case.base_of_row[row]]
        there = codec.encode(case.values[row : row + 1], alone)
        assert np.array_equal(alone.coded(there)[0], case.coded(buffer)[row])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_scattered_and_others_left(codec: Codec, name: str):
    case, buffer = encoded(codec, name)
    expected = torch.from_numpy(naive_decode(case, buffer))
    places = torch.randperm(case.total + 7, generator=torch.Generator().manual_seed(0))[: case.total]
    wide = torch.full((case.total + 7, case.width + 5), torch.pi, device=codec.device)  # rows apart in memory
    codec.decode_into(wide[:, 2 : 2 + case.width], buffer.to(codec.device), case, places)
    assert torch.equal(wide[:, 2 : 2 + case.width].cpu()[places], expected)
    others = [row for row in range(case.total + 7) if row not in places.tolist()]
    assert (wide[others] == torch.pi).all()
    assert (wide[:, :2] == torch.pi).all() and (wide[:, 2 + case.width :] == torch.pi).all()
    longer = codec.decode(buffer, case, torch.full((case.total + 3, case.width), torch.pi))
    assert torch.equal(longer[: case.total], expected) and (longer[case.total :] == torch.pi).all()


@pytest.mark.parametrize("chunk_rows", [1, 7, 300])
def test_chunks_are_the_whole(chunk_rows: int, monkeypatch: pytest.MonkeyPatch):
    """The reference goes through all rows of a call a few at a time."""
    case, reference = Case(20, 314), Codec(*REFERENCE)
    whole = reference.encode(case.values, case)
    monkeypatch.setattr(row_code, "CHUNK_ELEMENTS", chunk_rows * 20)
    buffer = reference.encode(case.values, case)
    assert torch.equal(buffer, whole)
    decoded = reference.decode(buffer, case)
    assert torch.equal(decoded, torch.from_numpy(naive_decode(case, buffer)))
    places = torch.randperm(case.total, generator=torch.Generator().manual_seed(0))
    assert torch.equal(reference.decode(buffer, case, torch.empty(case.total, 20), places)[places], decoded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_write_and_read_the_same_bytes(dtype: torch.dtype):
    """Triton against the reference, rows apart in memory and bases that repeat."""
    reference, triton = Codec(*REFERENCE), Codec(*TRITON)
    case = Case(200, 25)
    assert case.bases is not None
    case.bases[1] = 0
    values = torch.zeros(case.total, 300, dtype=dtype)[:, 50:250].copy_(case.values)
    buffer = reference.encode(values, case)
    assert torch.equal(triton.encode(values, case), buffer)
    assert torch.equal(triton.encode(values.T.contiguous().T, case), buffer)
    assert torch.equal(triton.decode(buffer, case), reference.decode(buffer, case))


def relative_error(values: Tensor, decoded: Tensor) -> float:
    return float((decoded.double() - values.double()).norm() / values.double().norm())


def test_a_residual_a_fifth_as_large_has_a_fifth_of_the_error(codec: Codec):
    """On rows near their base the error is that of NVFP4 times the residual's share of the norm."""
    case, plain = Case(256), Case(256, residual=False)
    error = relative_error(case.values, codec.decode(codec.encode(case.values, plain), plain))
    share = 0.25 / math.hypot(0.25, 1.25)
    assert error == pytest.approx(0.095, abs=0.005)
    decoded = codec.decode(codec.encode(case.values, case), case)
    assert relative_error(case.values, decoded) == pytest.approx(share * error, rel=0.1)


def test_rows_that_are_their_base(codec: Codec):
    """The residual is zero, and the row comes back whole."""
    case = Case(48, 4)
    assert case.bases is not None
    values = case.bases[case.base_of_row]
    assert torch.equal(codec.decode(codec.encode(values, case), case), values.float())


def test_a_base_of_zeros(codec: Codec):
    case, plain = Case(), Case(residual=False)
    assert case.bases is not None
    case.bases.zero_()
    decoded = codec.decode(codec.encode(case.values, case), case)
    assert torch.equal(decoded, codec.decode(codec.encode(case.values, plain), plain))


@pytest.mark.parametrize(
    ("row", "base", "bits"),
    [
        (1.00390625, 1.0, 0x3F80),  # halfway between 1 and the next BF16: the even one
        (1.01171875, 1.0, 0x3F82),
        (1.0039064, 1.0, 0x3F81),
        (-3.0, 2.0, 0xBFC0),
        (3.38e38, 1.0, 0x7F7E),
        (3.4e38, 1.0, 0),  # nearest in BF16 to infinity
        (1e30, 1e-30, 0),  # too large even for float32
        (1e38, 1e38, 0x3F80),  # though 1e76 is not
        (1e-40, 1e-20, 0x1E3D),
        (0.0, 0.0, 0),
    ],
)
def test_projections_round_to_nearest_even(codec: Codec, row: float, base: float, bits: int):
    case = Case(16, 2)
    case.bases, case.base_of_row = torch.zeros(1, 16), [0, 0]
    case.bases[0, 3] = base
    values = torch.zeros(2, 16)
    values[:, 3] = row
    coded = case.coded(codec.encode(values, case))
    assert coded[:, -2:].copy().view(np.uint16).flatten().tolist() == [bits, bits]


@pytest.mark.parametrize("name", ["residual", "plain", "fp8"])
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e37])
def test_extreme_rows_decode_to_finite_numbers(codec: Codec, factor: float, name: str):
    case = CASES[name]()
    decoded = codec.decode(codec.encode(case.values * factor, case), case)
    assert decoded.isfinite().all()
    bound = 0.2 * factor * case.values.abs().amax() + 1e-36
    assert ((decoded - case.values * factor).abs() <= bound).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["residual", "plain", "fp8"])
def test_a_row_that_is_not_finite_comes_back_as_nan(codec: Codec, value: float, name: str):
    """Its neighbours come back as ever."""
    case, finite = encoded(codec, name)
    values = case.values.clone()
    values[8, 20] = value
    decoded = codec.decode(codec.encode(values, case), case)
    assert decoded[8].isnan().all()
    expected = torch.from_numpy(naive_decode(case, finite))
    assert torch.equal(decoded[:8], expected[:8]) and torch.equal(decoded[9:], expected[9:])


def test_a_residual_that_overflows(codec: Codec):
    case = Case(16, 3)
    case.bases = torch.full((2, 16), 3e38)
    values = torch.full((3, 16), 3e38)
    values[:, 0] = -3e38  # along the base, 14/16 of it: far beside it in one column
    assert codec.decode(codec.encode(values, case), case).isnan().all()


def test_no_rows(codec: Codec):
    case = Case()
    case.numbers, case.base_of_row = case.numbers[:0], []
    buffer = codec.encode(case.values[:0], case)
    assert (buffer == UNTOUCHED).all()
    assert (codec.decode(buffer, case, torch.full((3, 48), torch.pi)) == torch.pi).all()


def test_places_out_of_range_reach_no_memory():
    """In Triton, which cannot refuse them."""
    codec, case = Codec(*TRITON), Case(total=4)
    buffer = codec.encode(case.values, case)
    around = torch.full((9, 48), torch.pi, device=codec.device)
    codec.decode_into(around[3:6], buffer.to(codec.device), case, torch.tensor([2, -1, 3, 0]))
    decoded = codec.decode(buffer, case)
    assert torch.equal(around[[5, 3]].cpu(), decoded[[0, 3]])
    assert (around[[0, 1, 2, 4, 6, 7, 8]] == torch.pi).all()


@pytest.mark.gpu
class TestOnAGpu:
    """At the width of LLaDA-8B, with many rows."""

    case = Case(4096, 235)

    def test_the_bytes_are_the_references(self):
        for dtype in [torch.float32, torch.bfloat16]:
            values = self.case.values.to(dtype)
            expected = Codec("_ref", "cpu").encode(values, self.case)
            assert torch.equal(Codec("", "cuda").encode(values, self.case), expected)
            assert torch.equal(Codec("_ref", "cuda").encode(values, self.case), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_pinned_memory_decodes_as_the_device_does(self, dtype: torch.dtype):
        buffer = Codec("_ref", "cpu").encode(self.case.values, self.case)
        expected = Codec("_ref", "cpu").decode(buffer, self.case, torch.empty(self.case.total, 4096, dtype=dtype))
        codec = Codec("", "cuda")
        for source in [buffer.cuda(), buffer.pin_memory()]:
            out = torch.empty(self.case.total, 4096, dtype=dtype, device="cuda")
            codec.decode_into(out, source, self.case)
            assert torch.equal(out.cpu(), expected)

    def test_pageable_memory_is_refused(self):
        codec, buffer = Codec("", "cuda"), torch.zeros(self.case.total + SPARE, self.case.row_bytes, dtype=torch.uint8)
        out = torch.empty(self.case.total, 4096, device="cuda")
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            codec.decode_into(out, buffer, self.case)
