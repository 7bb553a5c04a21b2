"""What attention cases draw, and the scores of it in float64."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import Given, KernelCase, dtype_name, normal, size

# Of a sum of exponentials of scores that are float32 sums of some hundred products, each exact.
SUMS = 1e-5
# No multiples of 16: Triton compiles a kernel anew where a number is one, which takes seconds. So what is timed has
# nearly all been compiled when it was checked.
CHECKED_KEYS, TIMED_KEYS, CHANGING = 5003, 32763, 289
TIMED_CLUSTERS = TIMED_KEYS // 64
SOFT_CAP = 30.0
_BESIDE = 7  # columns of a store in front of those that are read
_PADS = 40  # at the most


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Heads of a model, and whose they are."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int = 128

    def tiny(self) -> "HeadShape":
        """Two key heads, with two heads each where heads share them."""
        return replace(self, heads=2 if self.heads == self.kv_heads else 4, kv_heads=2, head_dim=24)


LLADA = HeadShape(model="llada", heads=32, kv_heads=32)
DREAM = HeadShape(model="dream", heads=28, kv_heads=4)
GIDD = HeadShape(model="gidd", heads=24, kv_heads=24)


@dataclass(frozen=True, kw_only=True)
class Attended:
    """Inputs, by the names of the kernels."""

    queries: Tensor
    keys: Tensor
    key_mask: Tensor | None = None
    soft_cap: float | None = None
    sink_keys: Tensor | None = None

    def scores64(self, keys: Tensor) -> Tensor:
        """[batch, heads, rows, sinks and columns], the sinks first; −inf where masked."""
        group = self.queries.shape[1] // keys.shape[1]
        queries, keys = self.queries.double(), keys.double().repeat_interleave(group, dim=1)
        scores = queries @ keys.mT
        if self.key_mask is not None:
            scores = scores.masked_fill(~self.key_mask[:, None, None], -torch.inf)
        if self.sink_keys is not None:
            scores = torch.cat([queries @ self.sink_keys.double().mT, scores], dim=3)
        scores = scores / queries.shape[3] ** 0.5
        if self.soft_cap is None:
            return scores
        return (self.soft_cap * (scores / self.soft_cap).tanh()).where(scores > -torch.inf, -torch.inf)

    def bytes_of_columns(self, *tensors: Tensor) -> int:
        """Of the columns that count in `tensors`, which are like the keys, and of the mask."""
        if self.key_mask is None:
            return size(*tensors)
        columns = int(self.key_mask.sum())
        return size(self.key_mask) + sum(columns * size(tensor[0, :, 0]) for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class AttentionCase(KernelCase[Given]):
    """Queries of some rows over `length` keys.

    Attributes:
        rows: of each head: centroids, or rows of a block.
        masked: pads on the right of the first sequence and on the left of the next; their keys are NaN.
        strided: keys are one layer of a store, and some of its columns; queries as a projection leaves them.
        sinks: of each head; None: the kernel is given none.
    """

    shape: HeadShape
    batch: int = 1
    rows: int
    length: int
    dtype: torch.dtype
    masked: bool = False
    strided: bool = False
    soft_cap: float | None = None
    sinks: int | None = None

    @property
    def name(self) -> str:
        notes = {"masked": self.masked, "strided": self.strided, "capped": self.soft_cap, "sinks": self.sinks}
        sizes = f"{self.shape.model} {self.batch}x{self.rows}x{self.length} {dtype_name(self.dtype)}"
        return " ".join([self.kernel, sizes, *(note for note, there in notes.items() if there)])

    @property
    def bound(self) -> float:
        return SUMS

    def tiny(self) -> Self:
        return replace(self, shape=self.shape.tiny(), rows=5, length=37)

    def attended(self, generator: torch.Generator) -> Attended:
        """Everything but values."""
        keys = self.cached(generator)
        key_mask = self.mask(generator.device) if self.masked else None
        if key_mask is not None:
            keys.transpose(1, 2)[~key_mask] = torch.nan
        sink_keys = None if self.sinks is None else self.of_sinks(generator)
        return Attended(
            queries=self.queries(generator),
            keys=keys,
            key_mask=key_mask,
            soft_cap=self.soft_cap,
            sink_keys=sink_keys,
        )

    def queries(self, generator: torch.Generator) -> Tensor:
        """[batch, heads, rows, head_dim]"""
        heads, head_dim = self.shape.heads, self.shape.head_dim
        if self.strided:
            return normal(generator, self.batch, self.rows, heads, head_dim, dtype=self.dtype).transpose(1, 2)
        return normal(generator, self.batch, heads, self.rows, head_dim, dtype=self.dtype)

    def cached(self, generator: torch.Generator) -> Tensor:
        """Keys or values: [batch, kv_heads, length, head_dim]"""
        layers, beside = (2, _BESIDE) if self.strided else (1, 0)
        sizes = (layers, self.batch, self.shape.kv_heads, self.length + beside, self.shape.head_dim)
        return normal(generator, *sizes, dtype=self.dtype)[-1][:, :, beside:]

    def of_sinks(self, generator: torch.Generator) -> Tensor:
        """Keys or values: [heads, sinks, head_dim]"""
        return normal(generator, self.shape.heads, self.sinks or 0, self.shape.head_dim, dtype=self.dtype)

    def mask(self, device: torch.device) -> Tensor:
        """[batch, length], a number of pads in each sequence."""
        pads = min(self.length // 9 + 1, _PADS)
        key_mask = torch.ones(self.batch, self.length, dtype=torch.bool, device=device)
        key_mask[::2, self.length - pads :] = False
        key_mask[1::2, :pads] = False
        return key_mask
