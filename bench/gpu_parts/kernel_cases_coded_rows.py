"""Cases of rows in codes, both ways: keys and values, and hidden states. Their bytes are the law."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, random_bytes, shuffled, size
from tiered.kernels import decode_rows_ref, encode_rows_ref
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import RowCode

_ERRORS = {RowCode.FP8: 0.05, RowCode.NVFP4: 0.15}  # over the norm: 0.027, 0.095 of normal numbers, and room for a few
_NEAR = 64  # rows of a base
_NOISE, _ALONG = 0.25, 1.25  # of rows: the part beside their base, and their projection on it
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SPARE = 7  # rows of a buffer, or of an output, that no number names


@dataclass(frozen=True, slots=True)
class Numbered:
    """Some rows of a buffer, with gaps and not in order.

    Attributes:
        buffer: bytes of rows for decoding, or memory that encoding writes into.
        numbers: numbers of the rows in `buffer`.
        rows: rows for encoding, or memory that decoding writes into.
        places: places of the decoded rows in `rows`; None for the first ones.
    """

    code: RowCode
    width: int
    base: RowBase | None
    buffer: Tensor
    numbers: Tensor
    rows: Tensor
    places: Tensor | None = None

    @property
    def by_host(self) -> tuple[Tensor, RowBase | None]:
        """Numbers and bases, for the reference on the CPU."""
        base = None if self.base is None else RowBase(self.base.bases.cpu(), self.base.of_row.cpu())
        return self.numbers.cpu(), base

    def rows64(self, buffer: Tensor) -> Tensor:
        """The rows in `buffer`, in float64."""
        return rows64(buffer.to(self.rows.device)[self.numbers], self.code, self.width, self.base)

    @property
    def nbytes(self) -> int:
        """Bytes that either way must move beside the rows: their codes, numbers, and chosen bases, once each."""
        moved = len(self.numbers) * self.buffer.shape[1] + size(self.numbers)
        if self.base is not None:
            moved += size(self.base.of_row) + len(self.base.of_row.unique()) * size(self.base.bases[0])
        return moved


@dataclass(frozen=True, kw_only=True)
class NumberedCase(KernelCase):
    """`pinned`: the buffer lies in host memory that the device can read."""

    rows: int
    width: int = 4096
    code: RowCode = RowCode.NVFP4
    residual: bool = True
    pinned: bool = False

    def tiny(self) -> Self:
        return replace(self, rows=6, width=32 + self.width % 16)

    def numbered(self, generator: torch.Generator, rows: Tensor) -> Numbered:
        """`rows` with random bytes for a buffer."""
        count = self.rows + _SPARE
        buffer = random_bytes(generator, count, self.code.row_bytes(self.width, residual=self.residual))
        numbers, base = shuffled(generator, count)[: self.rows], None
        if self.residual:
            used = self.rows // _NEAR + 2  # and one more that no row has
            bases = normal(generator, used + 1, self.width, dtype=self.dtype)
            ordered = torch.arange(self.rows, device=generator.device) * used // self.rows
            base = RowBase(bases, shuffled(generator, used + 1)[ordered])
        return Numbered(self.code, self.width, base, buffer, numbers, rows)


@dataclass(frozen=True, kw_only=True)
class DecodeRows(NumberedCase):
    """Codes of all values, scales of all sizes. `placed`: rows go to places, in rows that lie apart."""

    kernel, into, roundings = "decode_rows", "rows", 2  # Triton's interpreter does not round bfloat16 to nearest
    placed: bool = True

    def draw(self, generator: torch.Generator) -> Numbered:
        total = self.rows + _SPARE
        standing = normal(generator, total, self.width + (16 if self.placed else 0), dtype=self.dtype)
        given = self.numbered(generator, standing)
        places = shuffled(generator, total)[: self.rows] if self.placed else None
        coded, scale_at = given.buffer[given.numbers], self.code.scale_at(self.width)
        if self.code is RowCode.FP8:
            coded[:, :scale_at] &= 0xF7  # no NaN
        else:
            groups = slice(scale_at - -(-self.width // 16), scale_at)
            coded[:, groups] = random_bytes(generator, *coded[:, groups].shape, below=127)
        coded[:, scale_at] = random_bytes(generator, len(coded), below=8) + 120
        if self.residual:
            coded[:, -2:] = normal(generator, len(coded)).bfloat16().view(torch.uint8).view(-1, 2)
        given.buffer[given.numbers] = coded
        pinned = self.pinned and generator.device.type == "cuda"
        return replace(given, places=places, buffer=given.buffer.cpu().pin_memory() if pinned else given.buffer)

    def run(self, given: Numbered, room: Sequence[Tensor]) -> Sequence[Tensor]:
        out = room[0][:, : self.width]
        op(self.kernel)(given.buffer, self.code, out, given.numbers, given.places, given.base)
        return room

    def truth(self, given: Numbered) -> Sequence[Tensor]:
        return (_put(given, given.rows64(given.buffer), given.rows.double()),)

    def law(self, given: Numbered) -> Sequence[Tensor]:
        numbers, base = given.by_host
        rows = torch.empty(self.rows, self.width)
        decode_rows_ref.decode_rows(given.buffer.cpu(), self.code, rows, numbers, None, base)
        if self.dtype == torch.bfloat16 and given.rows.device.type == "cpu":
            # Triton's interpreter does not round to bfloat16, but cuts off.
            rows = (rows.view(torch.int32) & -0x10000).view(torch.float32)
        return (_put(given, rows.to(self.dtype), given.rows.cpu().clone()),)

    def moved(self, given: Numbered) -> int:
        return given.nbytes + size(given.places) + self.rows * self.width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class EncodeRows(NumberedCase):
    """Rows near their bases, which lie apart in memory."""

    kernel, into = "encode_rows", "buffer"

    @property
    def bound(self) -> float:
        return _ERRORS[self.code] * (_NOISE / (_NOISE**2 + _ALONG**2) ** 0.5 if self.residual else 1)

    def draw(self, generator: torch.Generator) -> Numbered:
        rows = normal(generator, self.rows, self.width + 16, dtype=self.dtype)[:, 8 : 8 + self.width]
        given = self.numbered(generator, rows)
        if given.base is not None:
            rows.mul_(_NOISE).add_(given.base.taken(slice(None)), alpha=_ALONG)
        return given

    def run(self, given: Numbered, room: Sequence[Tensor]) -> Sequence[Tensor]:
        op(self.kernel)(given.rows, self.code, room[0], given.numbers, given.base)
        return room

    def seen(self, given: Numbered, results: Sequence[Tensor]) -> Sequence[Tensor]:
        return (given.rows64(results[0]),)

    def truth(self, given: Numbered) -> Sequence[Tensor]:
        return (given.rows.double(),)

    def law(self, given: Numbered) -> Sequence[Tensor]:
        expected = given.buffer.cpu().clone()
        encode_rows_ref.encode_rows(given.rows.cpu(), self.code, expected, *given.by_host)
        return (expected,)

    def moved(self, given: Numbered) -> int:
        return given.nbytes + size(given.rows)


@dataclass(frozen=True, kw_only=True)
class EncodeHeads(KernelCase):
    """The keys or values of some rows, one behind the other."""

    kernel = "encode_rows"
    code: RowCode
    rows: int
    heads: int = 32
    head_dim: int = 128

    def tiny(self) -> Self:
        return replace(self, rows=11, heads=3, head_dim=32)

    def draw(self, generator: torch.Generator) -> Tensor:
        return normal(generator, self.rows * self.heads, self.head_dim, dtype=self.dtype)

    def room(self, given: Tensor) -> tuple[Tensor, ...]:
        return (given.new_empty(len(given), self.code.row_bytes(self.head_dim), dtype=torch.uint8),)

    def run(self, given: Tensor, room: Sequence[Tensor]) -> Sequence[Tensor]:
        op(self.kernel)(given, self.code, room[0])
        return room

    def law(self, given: Tensor) -> Sequence[Tensor]:
        (expected,) = self.room(given)
        encode_rows_ref.encode_rows(given, self.code, expected)
        return (expected,)

    def moved(self, given: Tensor) -> int:
        return size(given) + len(given) * self.code.row_bytes(self.head_dim)


def values64(codes: Tensor, block_scales: Tensor, scale: Tensor, width: int) -> Tensor:
    """Float64 [n, width] of bytes, [n, code_bytes] and [n, groups]. A byte has two E2M1 codes, the even column low. 16
    columns have an E4M3 scale; `scale` is for each row, or for all. It follows the description of the format, and
    shares no line with the kernels' codecs."""
    codes = codes.long()
    magnitudes = torch.tensor(_E2M1, dtype=torch.float64, device=codes.device)
    both = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    signed = magnitudes[both & 7] * (1 - 2 * (both >> 3))
    scales = e4m3_64(block_scales) * scale.double().reshape(-1, 1)
    return (signed * scales.repeat_interleave(16, dim=1))[:, :width]


def e4m3_64(codes: Tensor) -> Tensor:
    """Float64 of E4M3: a sign, 4 bits of exponent, 3 of mantissa, subnormal at exponent 0, 127 for NaN."""
    codes = codes.long()
    exponent, mantissa = codes >> 3 & 15, (codes & 7).double()
    values = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.double() - 7))
    return (values * (1 - 2 * (codes >> 7))).where(codes & 127 != 127, torch.nan)


def rows64(coded: Tensor, code: RowCode, width: int, base: RowBase | None) -> Tensor:
    """Float64 [n, width] of rows: codes, scales of groups, an E8M0 scale; with bases a BF16 projection last."""
    end = code.scale_at(width)
    scale = 2.0 ** (coded[:, end].double() - 127)
    if code is RowCode.FP8:
        values = e4m3_64(coded[:, :end]) * scale[:, None]
    else:
        groups = -(-width // 16)
        values = values64(coded[:, : groups * 8], coded[:, groups * 8 : end], scale, width)
    if base is not None:
        along = coded[:, -2:].contiguous().view(torch.bfloat16).double()
        values += along * base.taken(slice(None)).double()
    return values


def _put(given: Numbered, rows: Tensor, standing: Tensor) -> Tensor:
    """`standing` with `rows` at their places."""
    places = torch.arange(len(rows)) if given.places is None else given.places
    standing[places.to(rows.device), : rows.shape[1]] = rows
    return standing


_FEW, _ALL = 235, 16319  # a last program is not full
CHECKED: tuple[KernelCase, ...] = (
    DecodeRows(rows=_FEW),
    DecodeRows(rows=_FEW, pinned=True),
    DecodeRows(rows=_FEW, residual=False),
    DecodeRows(rows=_FEW, residual=False, code=RowCode.FP8),
    DecodeRows(rows=_FEW, width=3584, dtype=torch.float32, placed=False),
    DecodeRows(rows=_FEW, width=3573, dtype=torch.float16),
    EncodeRows(rows=_FEW),
    EncodeRows(rows=_FEW, residual=False),
    EncodeRows(rows=_FEW, residual=False, code=RowCode.FP8),
    EncodeRows(rows=_FEW, width=3573, dtype=torch.float32),
    *(EncodeHeads(code=code, rows=257) for code in RowCode),
    *(EncodeHeads(code=code, rows=257, dtype=torch.float32) for code in RowCode),
)
TIMED: tuple[KernelCase, ...] = (
    DecodeRows(rows=_ALL),
    DecodeRows(rows=319),  # rows of one layer's update
    EncodeRows(rows=_ALL),
    *(EncodeHeads(code=code, rows=rows) for code in RowCode for rows in (32, 512)),
)
