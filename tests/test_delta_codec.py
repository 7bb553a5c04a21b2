"""Packed records: their bytes, the way back, and that nothing beside them is touched."""

import importlib
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tiered.kernels import record_layout
from tiered.kernels.record_layout import Nvfp4Layout
from tiered.kernels.record_table import RecordTable
from tiered.offload.codec_bytes import codec_bytes

CUDA = torch.cuda.is_available()
UNTOUCHED = 0xA5  # what buffers are filled with

# Lanes without a row divide zero by zero, in numpy with a warning.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(params=["reference", "triton"])
def codec(request: pytest.FixtureRequest) -> "Codec":
    """Both implementations; Triton's on the GPU where there is one, else interpreted."""
    if request.param == "reference":
        return Codec("_ref", "cpu")
    return Codec("", "cuda" if CUDA else "cpu")


class Codec:
    """delta_encode and delta_decode of one implementation, for tensors on the CPU."""

    def __init__(self, suffix: str, device: str) -> None:
        self.device, self.suffix = device, suffix
        self._encode = importlib.import_module(f"tiered.kernels.delta_encode{suffix}").delta_encode
        self._decode = importlib.import_module(f"tiered.kernels.delta_decode{suffix}").delta_decode

    def encode(self, rows: Tensor, case: "Case", *, base: str = "projection", size: int | None = None) -> Tensor:
        """The buffer after encoding."""
        out = torch.full((size or case.size,), UNTOUCHED, dtype=torch.uint8, device=self.device)
        self._encode(rows.to(self.device), self.table(case), *self.centroids(case), out, base=base)
        return out.cpu()

    def decode(self, buffer: Tensor, case: "Case", out: Tensor | None = None, out_rows: Tensor | None = None) -> Tensor:
        """`out` after decoding into it."""
        out = torch.empty(case.total, case.width) if out is None else out
        there = out.to(self.device)
        rows = None if out_rows is None else out_rows.to(self.device)
        self._decode(buffer.to(self.device), self.table(case), *self.centroids(case), there, rows)
        return there.cpu()

    def table(self, case: "Case") -> RecordTable:
        delta = case.centroids is not None
        return RecordTable.build(case.rows, case.offsets, width=case.width, delta=delta, device=self.device)

    def centroids(self, case: "Case") -> tuple[Tensor | None, Tensor | None]:
        if case.centroids is None:
            return None, None
        return case.centroids.to(self.device), torch.tensor(case.centroid_of_record, device=self.device)


class Case:
    """Records of unequal sizes, not in the order of their rows and with gaps; clusters, one of them unused."""

    def __init__(self, width: int = 48, rows: tuple[int, ...] = (5, 1, 9, 2), *, delta: bool = True) -> None:
        self.width, self.rows, self.total = width, rows, sum(rows)
        places = [(3 * k) % len(rows) for k in range(len(rows))]  # a permutation: 3 divides no number of records here
        room = max(self.layout(k, delta).nbytes for k in range(len(rows))) // 128 * 128 + 256
        self.offsets = [128 + place * room for place in places]
        self.size = 128 + len(rows) * room
        generator = torch.Generator().manual_seed(width + len(rows))
        self.centroids = torch.randn(len(rows) + 1, width, generator=generator).bfloat16() if delta else None
        self.centroid_of_record = [len(rows) - k for k in range(len(rows))]
        self.values = torch.randn(self.total, width, generator=generator) * 0.25
        if self.centroids is not None:
            self.values += self.centroids.float()[[self.centroid_of_record[k] for k in self.record_of_row]] * 1.25

    def with_centroids(self, dtype: torch.dtype) -> "Case":
        """This case with centroids that need all the bits of `dtype`."""
        assert self.centroids is not None
        self.centroids = (self.centroids.float() * 1.1).to(dtype)
        return self

    @property
    def record_of_row(self) -> list[int]:
        return [k for k, count in enumerate(self.rows) for _ in range(count)]

    def layout(self, record: int, delta: bool | None = None) -> Nvfp4Layout:
        delta = self.centroids is not None if delta is None else delta
        return Nvfp4Layout(self.rows[record], self.width, delta)

    def record(self, buffer: Tensor, record: int) -> np.ndarray:
        """The bytes of a record."""
        return buffer.numpy()[self.offsets[record] :][: self.layout(record).nbytes]


CASES = {
    "delta": lambda: Case(),
    "float32 centroids": lambda: Case().with_centroids(torch.float32),  # their products with projections round
    "plain": lambda: Case(delta=False),
    "width 1": lambda: Case(1),
    "width 37": lambda: Case(37),
    "wide": lambda: Case(1100, (3, 6)),
    "one row": lambda: Case(16, (1,)),
    "one record": lambda: Case(32, (19,)),
    "many records": lambda: Case(16, (1,) * 11),
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
    rows = []
    for k, count in enumerate(case.rows):
        layout, record = case.layout(k), case.record(buffer, k)
        scale = record[layout.record_scale :][:4].view(np.float32)[0]
        for i in range(count):
            codes = record[i * layout.groups * 8 :][: layout.groups * 8]
            values = np.stack([e2m1[codes & 15], e2m1[codes >> 4]], axis=1).reshape(-1)
            scales = torch.from_numpy(record[layout.block_scales + i * layout.groups :][: layout.groups].copy())
            scales = scale * scales.view(torch.float8_e4m3fn).float().numpy()
            row = (values * np.repeat(scales, 16))[: case.width]
            if case.centroids is not None:
                bits = record[layout.projections + 2 * i :][:2].view(np.uint16)[0]
                projection = (np.uint32(bits) << np.uint32(16)).view(np.float32)
                row = projection * case.centroids[case.centroid_of_record[k]].float().numpy() + row
            rows.append(row)
    return np.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_decoding_is_the_formats_arithmetic(codec: Codec, name: str):
    case, buffer = encoded(codec, name)
    decoded = codec.decode(buffer, case).numpy()
    assert np.array_equal(decoded.view(np.int32), naive_decode(case, buffer).view(np.int32))


@pytest.mark.parametrize(
    ("dtype", "base"), [(torch.float32, "projection"), (torch.bfloat16, "projection"), (torch.bfloat16, "mean")]
)
@pytest.mark.parametrize("name", CASES)
def test_records_are_torchaos_nvfp4_of_the_residual(codec: Codec, name: str, dtype: torch.dtype, base: str):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    case, buffer = encoded(codec, name)
    values = case.values.to(dtype)
    if (dtype, base) != (torch.float32, "projection"):
        buffer = codec.encode(values, case, base=base)
    first = 0
    for k, count in enumerate(case.rows):
        layout, record = case.layout(k), case.record(buffer, k)
        residual = values[first : first + count].float()
        first += count
        if case.centroids is not None:
            centroid = case.centroids[case.centroid_of_record[k]].float()
            projections = torch.ones(count)
            if base == "projection":
                square = math.fsum(c * c for c in centroid.tolist())
                products = [[x * c for x, c in zip(row, centroid.tolist(), strict=True)] for row in residual.tolist()]
                projections = torch.tensor([math.fsum(row) / square for row in products])
            projections = projections.bfloat16()
            stored = torch.from_numpy(record[layout.projections : layout.block_scales].copy()).view(torch.bfloat16)
            assert torch.equal(stored, projections)
            residual = residual - projections.float()[:, None] * centroid
        padded = torch.zeros(count, 16 * layout.groups)
        padded[:, : case.width] = residual
        scale = per_tensor_amax_to_scale(padded.abs().amax())
        if scale == 0:
            scale = torch.tensor(1.0)
        assert record[layout.record_scale : layout.projections].view(np.float32) == scale.numpy()
        theirs_scales, theirs = nvfp4_quantize(padded, per_tensor_scale=scale)
        scales = torch.from_numpy(record[layout.block_scales :].copy()).view(count, -1)
        codes = torch.from_numpy(record[: layout.record_scale].copy()).view(count, -1, 8)
        assert torch.equal(scales.clamp(min=8), theirs_scales.view(torch.uint8))  # ours go below their floor of 2^-6
        assert torch.equal(codes[scales >= 8], theirs.view(count, -1, 8)[scales >= 8])
    assert first == case.total


@pytest.mark.parametrize("name", CASES)
def test_records_take_the_books_bytes_and_no_other(codec: Codec, name: str):
    case, buffer = encoded(codec, name)
    written = buffer != UNTOUCHED
    again = codec.encode(-2 * case.values, case) != UNTOUCHED  # a byte may be UNTOUCHED by chance, hardly twice
    inside = torch.zeros(case.size, dtype=torch.bool)
    for k, count in enumerate(case.rows):
        codec_name = "nvfp4" if case.centroids is None else "nvfp4_delta"
        nbytes = codec_bytes(codec_name, count, case.width, element_bytes=2)
        inside[case.offsets[k] :][:nbytes] = True
        last = (written | again)[case.offsets[k] :][:nbytes].nonzero().max()
        assert last >= nbytes - 1 - case.layout(k).groups
    assert not (written | again)[~inside].any()


@pytest.mark.parametrize("name", CASES)
def test_a_record_depends_on_its_own_rows_alone(codec: Codec, name: str):
    """A record can be rewritten alone, and may lie anywhere."""
    case, buffer = encoded(codec, name)
    first = 0
    for k, count in enumerate(case.rows):
        alone = Case(case.width, (count,), delta=case.centroids is not None)
        alone.centroids, alone.centroid_of_record = case.centroids, [case.centroid_of_record[k]]
        if k % 3 == 0:  # a few are enough
            there = codec.encode(case.values[first : first + count], alone)
            assert np.array_equal(alone.record(there, 0), case.record(buffer, k))
        first += count


@pytest.mark.parametrize("name", CASES)
def test_rows_are_scattered_and_others_left(codec: Codec, name: str):
    case, buffer = encoded(codec, name)
    expected = torch.from_numpy(naive_decode(case, buffer))
    out_rows = torch.randperm(case.total + 7, generator=torch.Generator().manual_seed(0))[: case.total]
    out = torch.full((case.total + 7, case.width + 5), torch.pi)  # rows apart in memory
    codec_out = codec.decode(buffer, case, out[:, 2 : 2 + case.width], out_rows)
    assert torch.equal(codec_out[out_rows], expected)
    others = [row for row in range(case.total + 7) if row not in out_rows.tolist()]
    assert (codec_out[others] == torch.pi).all()
    longer = codec.decode(buffer, case, torch.full((case.total + 3, case.width), torch.pi))
    assert torch.equal(longer[: case.total], expected) and (longer[case.total :] == torch.pi).all()


@pytest.mark.parametrize("width", [5, 32])
def test_the_columns_beside_a_view_are_left(codec: Codec, width: int):
    """Rows of `out` may be part of wider ones: what is beside them stays."""
    case = Case(width)
    wide = torch.full((case.total, width + 5), torch.pi, device=codec.device)
    buffer = codec.encode(case.values, case)
    codec._decode(buffer.to(codec.device), codec.table(case), *codec.centroids(case), wide[:, 2 : 2 + width])
    assert torch.equal(wide[:, 2 : 2 + width].cpu(), codec.decode(buffer, case))
    assert (wide[:, :2] == torch.pi).all() and (wide[:, 2 + width :] == torch.pi).all()


@pytest.mark.parametrize("chunk_rows", [1, 7, 300])
def test_chunks_are_the_whole(chunk_rows: int, monkeypatch: pytest.MonkeyPatch):
    """The reference goes through all rows of a call, whatever their records, a few at a time."""
    case, reference = Case(20, (300, 2, 11, 1)), Codec("_ref", "cpu")
    whole = reference.encode(case.values, case)
    monkeypatch.setattr(record_layout, "CHUNK_ELEMENTS", chunk_rows * 20)
    buffer = reference.encode(case.values, case)
    assert torch.equal(buffer, whole)
    decoded = reference.decode(buffer, case)
    assert torch.equal(decoded, torch.from_numpy(naive_decode(case, buffer)))
    out_rows = torch.randperm(case.total, generator=torch.Generator().manual_seed(0))
    assert torch.equal(reference.decode(buffer, case, torch.empty(case.total, 20), out_rows)[out_rows], decoded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_write_and_read_the_same_bytes(dtype: torch.dtype):
    """Triton against the reference, rows apart in memory and centroids that repeat."""
    reference, triton = Codec("_ref", "cpu"), Codec("", "cuda" if CUDA else "cpu")
    case = Case(200, (7, 1, 10, 2, 5))
    case.centroid_of_record = [4, 0, 4, 1, 1]
    assert case.centroids is not None
    case.centroids[1] = 0
    values = torch.zeros(case.total, 300, dtype=dtype)[:, 50:250].copy_(case.values)
    buffer = reference.encode(values, case)
    assert torch.equal(triton.encode(values, case), buffer)
    assert torch.equal(triton.encode(values.T.contiguous().T, case), buffer)
    assert torch.equal(triton.decode(buffer, case), reference.decode(buffer, case))


def relative_error(values: Tensor, decoded: Tensor) -> float:
    return float((decoded.double() - values.double()).norm() / values.double().norm())


def test_a_residual_a_fifth_as_large_has_a_fifth_of_the_error(codec: Codec):
    """On rows near their centroids the error of a delta is that of NVFP4 times the residual's share of the norm."""
    case = Case(256, (9, 8))
    plain = Case(256, (9, 8), delta=False)
    error = relative_error(case.values, codec.decode(codec.encode(case.values, plain), plain))
    share = 0.25 / math.hypot(0.25, 1.25)
    assert error == pytest.approx(0.095, abs=0.005)
    for base, expected in [("projection", share * error), ("mean", math.hypot(share, 0.25 / 1.3) * error)]:
        decoded = codec.decode(codec.encode(case.values, case, base=base), case)
        assert relative_error(case.values, decoded) == pytest.approx(expected, rel=0.1)


def test_the_mean_base_needs_no_projection(codec: Codec):
    case = Case()
    buffer = codec.encode(case.values, case, base="mean")
    for k in range(len(case.rows)):
        layout = case.layout(k)
        bits = case.record(buffer, k)[layout.projections : layout.block_scales].view(np.uint16)
        assert (bits == 0x3F80).all()


def test_rows_that_are_their_centroid(codec: Codec):
    """A single member: the residual is zero, its record scale 1, and the row comes back whole."""
    case = Case(48, (1, 3))
    assert case.centroids is not None
    values = case.centroids[[case.centroid_of_record[k] for k in case.record_of_row]]
    buffer = codec.encode(values, case)
    assert case.record(buffer, 0)[case.layout(0).record_scale :][:4].view(np.float32) == 1
    assert torch.equal(codec.decode(buffer, case), values.float())


def test_a_centroid_of_zeros(codec: Codec):
    case, plain = Case(), Case(delta=False)
    assert case.centroids is not None
    case.centroids.zero_()
    decoded = codec.decode(codec.encode(case.values, case), case)
    assert torch.equal(decoded, codec.decode(codec.encode(case.values, plain), plain))


@pytest.mark.parametrize(
    ("row", "centroid", "bits"),
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
def test_projections_round_to_nearest_even(codec: Codec, row: float, centroid: float, bits: int):
    case = Case(16, (2,))
    case.centroids, case.centroid_of_record = torch.zeros(1, 16), [0]
    case.centroids[0, 3] = centroid
    values = torch.zeros(2, 16)
    values[:, 3] = row
    layout = case.layout(0)
    record = case.record(codec.encode(values, case), 0)
    assert record[layout.projections : layout.block_scales].view(np.uint16).tolist() == [bits, bits]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e37])
def test_extreme_rows_decode_to_finite_numbers(codec: Codec, factor: float, delta: bool):
    case = Case(delta=delta)
    decoded = codec.decode(codec.encode(case.values * factor, case), case)
    assert decoded.isfinite().all()
    bound = 0.2 * factor * case.values.abs().amax() + 1e-36
    assert ((decoded - case.values * factor).abs() <= bound).all()


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("delta", [True, False])
def test_rows_that_are_not_finite(value: float, delta: bool):
    """The reference refuses them before it writes; Triton's record decodes to NaN, and its neighbours as ever."""
    reference, triton = Codec("_ref", "cpu"), Codec("", "cuda" if CUDA else "cpu")
    case, finite = encoded(triton, "delta" if delta else "plain")
    values = case.values.clone()
    values[8, 20] = value  # of record 2
    out = torch.full((case.size,), UNTOUCHED, dtype=torch.uint8)
    with pytest.raises(ValueError, match="rows hold values that are infinite or NaN"):
        reference._encode(values, reference.table(case), *reference.centroids(case), out)
    assert (out == UNTOUCHED).all()

    buffer = triton.encode(values, case)
    scale = case.record(buffer, 2)[case.layout(2).record_scale :][:4].view(np.float32)[0]
    assert np.isnan(scale)
    decoded = triton.decode(buffer, case)
    assert decoded[6:15].isnan().all()
    expected = torch.from_numpy(naive_decode(case, finite))
    assert torch.equal(decoded[:6], expected[:6]) and torch.equal(decoded[15:], expected[15:])


def test_a_residual_that_overflows():
    case = Case(16, (1, 2))
    case.centroids = torch.full((3, 16), -3e38)
    reference, triton = Codec("_ref", "cpu"), Codec("", "cuda" if CUDA else "cpu")
    with pytest.raises(ValueError, match="infinite or NaN"):
        reference.encode(torch.full((3, 16), 3e38), case, base="mean")
    assert triton.decode(triton.encode(torch.full((3, 16), 3e38), case, base="mean"), case).isnan().all()


def test_no_records(codec: Codec):
    case = Case(rows=(4,))
    case.rows, case.offsets, case.total, case.centroid_of_record = (), [], 0, []
    index = torch.empty(0, dtype=torch.int64)
    assert case.centroids is not None
    buffer = torch.full((128,), UNTOUCHED, dtype=torch.uint8, device=codec.device)
    centroids = case.centroids.to(codec.device)
    codec._encode(case.values[:0].to(codec.device), codec.table(case), centroids, index.to(codec.device), buffer)
    assert (buffer == UNTOUCHED).all()
    out = torch.full((3, 48), torch.pi, device=codec.device)
    codec._decode(buffer, codec.table(case), centroids, index.to(codec.device), out)
    assert (out == torch.pi).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": (5, 1, 9, 3)}, r"rows \(17, 48\) do not fit the table: \[18, 48\]"),
        ({"width": 47}, r"rows \(17, 48\) do not fit the table: \[17, 47\]"),
    ],
)
def test_rows_that_do_not_fit(codec: Codec, change: dict, message: str):
    case = Case()
    vars(case).update(change)
    with pytest.raises(ValueError, match=message):
        codec.encode(case.values, case)


def test_an_unknown_base(codec: Codec):
    with pytest.raises(ValueError, match="unknown base 'median'; allowed: 'projection', 'mean'"):
        codec.encode(Case().values, Case(), base="median")


@pytest.mark.parametrize(
    ("out", "out_rows", "message"),
    [
        (torch.zeros(16, 48), None, "out has 16 rows for 17"),
        (torch.zeros(17, 47), None, r"out \(17, 47\)"),
        (torch.zeros(17, 96)[:, ::2], None, r"strides \(96, 2\)"),
        (torch.zeros(17, 48), torch.arange(16), r"out_rows is torch.int64 \(16,\)"),
        (torch.zeros(17, 48), torch.arange(17).int(), r"out_rows is torch.int32"),
    ],
)
def test_an_out_that_does_not_fit(codec: Codec, out: Tensor, out_rows: Tensor | None, message: str):
    case = Case()
    buffer = torch.zeros(case.size, dtype=torch.uint8)
    arguments = (out.to(codec.device), None if out_rows is None else out_rows.to(codec.device))
    with pytest.raises(ValueError, match=message):
        codec._decode(buffer.to(codec.device), codec.table(case), *codec.centroids(case), *arguments)


@pytest.mark.gpu
class TestOnAGpu:
    """At the width of LLaDA-8B, with many records."""

    case = Case(4096, (64, 1, 100, 63, 7))

    def test_the_bytes_are_the_references(self):
        for dtype in [torch.float32, torch.bfloat16]:
            for base in ["projection", "mean"]:
                values = self.case.values.to(dtype)
                expected = Codec("_ref", "cpu").encode(values, self.case, base=base)
                assert torch.equal(Codec("", "cuda").encode(values, self.case, base=base), expected)
                assert torch.equal(Codec("_ref", "cuda").encode(values, self.case, base=base), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_pinned_memory_decodes_as_the_device_does(self, dtype: torch.dtype):
        buffer = Codec("_ref", "cpu").encode(self.case.values, self.case)
        expected = Codec("_ref", "cpu").decode(buffer, self.case, torch.empty(self.case.total, 4096, dtype=dtype))
        codec = Codec("", "cuda")
        for source in [buffer.cuda(), buffer.pin_memory()]:
            out = torch.empty(self.case.total, 4096, dtype=dtype, device="cuda")
            codec._decode(source, codec.table(self.case), *codec.centroids(self.case), out)
            assert torch.equal(out.cpu(), expected)

    def test_pageable_memory_is_refused(self):
        codec = Codec("", "cuda")
        out = torch.empty(self.case.total, 4096, device="cuda")
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            codec._decode(
                torch.zeros(self.case.size, dtype=torch.uint8),
                codec.table(self.case),
                *codec.centroids(self.case),
                out,
            )
