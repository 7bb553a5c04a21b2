"""Cases of attention: of a block's rows and of centroids, by our kernel and by torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, size
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.keys_of_values import KeysOfValues
from tiered.kernels.row_code import RowCode
from tiered.policies.polestar.hidden_bytes import CENTROIDS_AT_ONCE

# Error of a sum of exponentials of scores, which are float32 sums of some hundred products, each exact.
_SUMS = 1e-5
# No multiples of 16: Triton compiles a kernel anew for such a number, which takes seconds. So nearly all timed kernels
# have been compiled by checks.
CHECKED_KEYS, TIMED_KEYS = 5003, 32763
SOFT_CAP = 30.0
_BESIDE = 7  # columns of a store in front of those that are read
_PADS = 40  # most pads of a sequence


class HeadShape(NamedTuple):
    """Heads of a model, and the model's name."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int = 128

    def __str__(self) -> str:
        return self.model

    def tiny(self, head_dim: int = 24) -> "HeadShape":
        """Two key heads, with two heads each if heads share them."""
        return HeadShape(self.model, 2 if self.heads == self.kv_heads else 4, 2, head_dim)


LLADA, DREAM, GIDD = HeadShape("llada", 32, 32), HeadShape("dream", 28, 4), HeadShape("gidd", 24, 24)
GEMMA = HeadShape("diffusion-gemma", 16, 2, 512)


@dataclass(frozen=True, kw_only=True)
class Attended:
    """Inputs, by the names of the kernels. `coded`: codes of keys and values, from which `keys` and `values` are
    decoded. `made`: the keys, if they are made of values."""

    queries: Tensor
    keys: Tensor
    key_mask: Tensor | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sink_keys: Tensor | None = None
    values: Tensor | None = None
    sink_values: Tensor | None = None
    start: Tensor | None = None
    stop: Tensor | None = None
    coded: tuple[CodedRows, CodedRows] | None = None
    made: KeysOfValues | None = None

    def scores64(self, keys: Tensor) -> Tensor:
        """[batch, heads, rows, sinks and columns], the sinks first; −inf if masked."""
        scores = self.queries.double() @ self._doubles(keys).mT
        column = torch.arange(keys.shape[2], device=scores.device)
        if self.start is not None:
            scores = scores.masked_fill(column < self.start[:, None, :, None], -torch.inf)
        if self.stop is not None:
            scores = scores.masked_fill(column >= self.stop[:, None, :, None], -torch.inf)
        if self.key_mask is not None:
            scores = scores.masked_fill(~self.key_mask[:, None, None], -torch.inf)
        if self.sink_keys is not None:
            scores = torch.cat([self.queries.double() @ self.sink_keys.double().mT, scores], dim=3)
        scores = scores * (self.queries.shape[3] ** -0.5 if self.scale is None else self.scale)
        if self.soft_cap is None:
            return scores
        return (self.soft_cap * (scores / self.soft_cap).tanh()).where(scores > -torch.inf, -torch.inf)

    def mixed64(self) -> Tensor:
        """[batch, heads, rows, head_dim]: zeros if a row sees nothing."""
        assert self.values is not None, "nothing to mix"
        values = self._doubles(self.values)
        if self.sink_values is not None:
            values = torch.cat([self.sink_values.double().expand(len(values), -1, -1, -1), values], dim=2)
        return self.scores64(self.keys).softmax(3).nan_to_num(0.0) @ values

    def _doubles(self, rows: Tensor) -> Tensor:
        return rows.double().repeat_interleave(self.queries.shape[1] // rows.shape[1], dim=1)

    def nbytes(self) -> int:
        """Bytes of queries, of the columns that count, and of the inputs beside them, once each."""
        both = [self.keys] if self.values is None else [self.keys, self.values]
        if self.coded is not None:
            both = [rows.bytes for rows in self.coded]
        if self.made is not None:
            both = both[1:]
        columns = size(*both)
        column = sum(size(tensor[0, :, 0]) for tensor in both)
        if self.key_mask is not None:
            columns = int(self.key_mask.sum()) * column
        elif self.start is not None:
            columns -= int(self.start.sum()) * column
        beside = (self.key_mask, self.sink_keys, self.sink_values, self.start, self.stop)
        if self.made is not None:
            beside += (self.made.weight, self.made.cos, self.made.sin)
        return columns + size(self.queries, *beside)


@dataclass(frozen=True, kw_only=True)
class AttentionCase(KernelCase):
    """Queries of some rows over `length` keys.

    Attributes:
        products: number of matrix products of queries and columns; 1 if there are no values.
        rows: rows of each head: centroids, or rows of a block.
        masked: pads on the right of the first sequence and on the left of the next; keys there are `at_pads`.
        strided: keys are one layer of a store, and some of its columns; queries lie as a projection leaves them.
        sinks: number of sinks of each head; None for no sinks.
    """

    products: ClassVar[int] = 2
    at_pads: ClassVar[float] = torch.nan
    error, roundings = _SUMS, 2  # weights are rounded to the dtype as well
    shape: HeadShape
    batch: int = 1
    rows: int
    length: int = CHECKED_KEYS
    masked: bool = False
    strided: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    sinks: int | None = None

    def tiny(self) -> Self:
        return replace(self, shape=self.shape.tiny(), rows=5, length=37)

    def draw(self, generator: torch.Generator) -> Attended:
        heads, kv_heads, head_dim = self.shape[1:]
        layers, beside = (2, _BESIDE) if self.strided else (1, 0)

        def cached() -> Tensor:
            sizes = layers, self.batch, kv_heads, self.length + beside, head_dim
            return normal(generator, *sizes, dtype=self.dtype)[-1][:, :, beside:]

        def of_sinks() -> Tensor | None:
            return None if self.sinks is None else normal(generator, heads, self.sinks, head_dim, dtype=self.dtype)

        keys, key_mask = cached(), self.mask(generator.device) if self.masked else None
        if key_mask is not None:
            keys.transpose(1, 2)[~key_mask] = self.at_pads
        rows = (self.rows, heads) if self.strided else (heads, self.rows)
        queries = normal(generator, self.batch, *rows, head_dim, dtype=self.dtype)
        given = Attended(
            queries=queries.transpose(1, 2) if self.strided else queries,
            keys=keys,
            key_mask=key_mask,
            scale=self.scale,
            soft_cap=self.soft_cap,
            sink_keys=of_sinks(),
        )
        return given if self.products == 1 else replace(given, values=cached(), sink_values=of_sinks())

    def mask(self, device: torch.device) -> Tensor:
        """[batch, length], False at the pads of each sequence."""
        key_mask = torch.ones(self.batch, self.length, dtype=torch.bool, device=device)
        key_mask[::2, self.length - self.pads :] = False
        key_mask[1::2, : self.pads] = False
        return key_mask

    @property
    def pads(self) -> int:
        """Number of pads of a sequence that has some."""
        return min(self.length // 9 + 1, _PADS)

    def truth(self, given: Any) -> Sequence[Tensor]:
        return (given.mixed64(),)

    def moved(self, given: Any) -> int:
        return given.nbytes() + size(given.queries)  # the result is as large as those

    def arithmetic(self, given: Any) -> int:
        return 2 * self.products * given.queries.numel() * self.length


@dataclass(frozen=True, kw_only=True)
class BlockAttention(AttentionCase):
    """`seen` gives the rows, and Σ exp(score) of each.

    Attributes:
        partly: a row sees the first columns only; the first row of each sequence all of them, the last none.
        padded: pads on the left of every other sequence, given by its first column.
        code: code of keys and values, which are some columns of a store; None for raw ones.
    """

    kernel = "block_attention"
    partly: bool = False
    padded: bool = False
    code: RowCode | None = None

    def tiny(self) -> Self:
        return replace(super().tiny(), shape=self.shape.tiny(24 if self.code is None else 32))

    def draw(self, generator: torch.Generator) -> Attended:
        given, device = super().draw(generator), generator.device
        if self.partly:
            most = torch.randint(self.length, (self.batch, self.rows), generator=generator, device=device)
            most[:, 0], most[:, -1] = self.length, 0
            given = replace(given, stop=most)
        if self.padded:
            given = replace(given, start=(torch.arange(self.batch, device=device) % 2 * self.pads)[:, None])
        if self.code is None:
            return given
        assert given.values is not None
        keys, values = self.coded(given.keys, self.code), self.coded(given.values, self.code)
        if given.key_mask is not None:
            keys.bytes.transpose(1, 2)[~given.key_mask] = 255
        return replace(given, keys=keys.values(), values=values.values(), coded=(keys, values))

    def coded(self, rows: Tensor, code: RowCode) -> CodedRows:
        """`rows` in codes, as some columns of a store; 0 in place of NaN."""
        coded = CodedRows.of(rows.nan_to_num(), code)
        store = coded.bytes.new_full((*coded.shape[:2], _BESIDE + self.length, coded.bytes.shape[3]), 255)
        store[:, :, _BESIDE:] = coded.bytes
        return replace(coded, bytes=store[:, :, _BESIDE:])

    def run(self, given: Attended, room: Sequence[Tensor]) -> Sequence[Tensor]:
        beside = ("scale", "soft_cap", "sink_keys", "sink_values", "key_mask", "start", "stop")
        options = {name: getattr(given, name) for name in beside}
        keys, values = given.coded or (given.keys, given.values)
        mixed, whole = op(self.kernel)(given.queries, given.made or keys, values, **options)
        return mixed, whole.peak, whole.mass

    def seen(self, given: Attended, results: Sequence[Tensor]) -> Sequence[Tensor]:
        mixed, peak, mass = results
        return mixed, (peak.double().exp() * mass.double())[..., None]

    def truth(self, given: Attended) -> Sequence[Tensor]:
        return given.mixed64(), given.scores64(given.keys).exp().sum(3, keepdim=True)

    def moved(self, given: Attended) -> int:
        return super().moved(given) + 2 * 4 * given.queries[..., 0].numel()


@dataclass(frozen=True, kw_only=True)
class MadeKeys(BlockAttention):
    """Attention of a block with keys that are made of values.

    Attributes:
        turning: pairs of elements that turn.
    """

    roundings = 4  # queries times weights, and keys that turn
    turning: int

    def tiny(self) -> Self:
        return replace(super().tiny(), shape=self.shape.tiny(64), turning=8)

    def draw(self, generator: torch.Generator) -> Attended:
        given = super().draw(generator)
        assert given.values is not None
        values = given.values if given.coded is None else given.coded[1]
        angles = 9 * normal(generator, 1, 1, self.length, self.turning, dtype=torch.float32)
        weight = 1 + 0.1 * normal(generator, self.shape.head_dim, dtype=self.dtype)
        made = KeysOfValues(values, weight, angles.cos(), angles.sin())
        return replace(given, keys=made.values(), made=made)


@dataclass(frozen=True, kw_only=True)
class TorchAttention(AttentionCase):
    """Attention of a block by torch."""

    kernel, triton, at_pads = "scaled_dot_product_attention", False, 0.0  # torch multiplies values there by 0

    def run(self, given: Attended, room: Sequence[Tensor]) -> Sequence[Tensor]:
        mask = None if given.key_mask is None else given.key_mask[:, None, None]
        assert given.values is not None
        batch, _, _, head_dim = given.queries.shape
        # As `attend` does it: the heads that share a key head are more rows of that head.
        folded = given.queries.reshape(batch, given.keys.shape[1], -1, head_dim)
        mixed = F.scaled_dot_product_attention(folded, given.keys, given.values, mask, scale=given.scale)
        return (mixed.view(given.queries.shape),)


_FP16, _FP32 = torch.float16, torch.float32
_CAPPED: dict[str, Any] = {"rows": 32, "soft_cap": SOFT_CAP}
_TIMED: dict[str, Any] = {"length": TIMED_KEYS, "masked": True}
CHECKED: tuple[KernelCase, ...] = (
    TorchAttention(shape=DREAM, batch=2, rows=32, masked=True, strided=True),
    BlockAttention(shape=GIDD, batch=2, masked=True, partly=True, sinks=1, **_CAPPED),
    BlockAttention(shape=GIDD, dtype=_FP16, strided=True, partly=True, **_CAPPED),
    BlockAttention(shape=DREAM, dtype=_FP32, masked=True, strided=True, sinks=2, **_CAPPED),
    BlockAttention(shape=LLADA, batch=2, rows=32, padded=True),
    BlockAttention(shape=DREAM, rows=256, strided=True, scale=1 / 16),
    *(BlockAttention(shape=LLADA, batch=2, rows=32, padded=True, code=code) for code in RowCode),
    *(BlockAttention(shape=DREAM, rows=256, dtype=_FP16, strided=True, code=code) for code in RowCode),
    *(
        BlockAttention(shape=GIDD, dtype=_FP32, masked=True, partly=True, sinks=1, code=code, **_CAPPED)
        for code in RowCode
    ),
    *(MadeKeys(shape=GEMMA, turning=64, rows=256, strided=True, partly=True, code=code) for code in (None, *RowCode)),
)
TIMED: tuple[KernelCase, ...] = (
    BlockAttention(shape=LLADA, rows=CENTROIDS_AT_ONCE, **_TIMED),  # as drift has them
    BlockAttention(shape=DREAM, rows=CENTROIDS_AT_ONCE, **_TIMED),
    BlockAttention(shape=GIDD, partly=True, sinks=1, **_TIMED, **_CAPPED),
    *(
        BlockAttention(shape=LLADA, rows=rows, length=length, code=code)
        for rows, length in ((32, 1024), (32, 4096), (32, 32768), (512, 32768))
        for code in (None, *RowCode)
    ),
    BlockAttention(shape=GEMMA, rows=256, length=32768),
    *(MadeKeys(shape=GEMMA, turning=64, rows=256, length=32768, code=code) for code in (None, *RowCode)),
    *(
        TorchAttention(shape=LLADA, rows=rows, length=length, masked=masked)
        for rows, length in ((32, 1024), (32, 4096), (32, 16384), (32, 32768), (512, 32768))
        for masked in (False, True)
    ),
)
