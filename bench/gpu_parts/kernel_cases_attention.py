"""Cases of attention: of centroids over all keys, of a block's rows with a cap, of a block's rows as torch does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpu_parts.attention_inputs import (
    CHECKED_KEYS,
    DREAM,
    GIDD,
    LLADA,
    SOFT_CAP,
    SUMS,
    TIMED_CLUSTERS,
    TIMED_KEYS,
    Attended,
    AttentionCase,
)
from gpu_parts.kernel_case import ROUNDING, KernelCase, op, size
from tiered.models.attention import attend


@dataclass(frozen=True, kw_only=True)
class ProxyAttention(AttentionCase[Attended]):
    """Seen: Σ exp(score) and the largest exp(score), so that an error is one of probabilities."""

    kernel: ClassVar[str] = "proxy_attention"

    @property
    def row_bound(self) -> float:
        return 5 * self.bound  # a row is a number

    def draw(self, generator: torch.Generator) -> Attended:
        return self.attended(generator)

    def run(self, given: Attended, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = op(self.kernel)(given.queries, given.keys, given.key_mask, given.soft_cap)
        return found.peak, found.mass

    def seen(self, given: Attended, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        largest = results[0].double().exp()[..., None]
        return largest * results[1].double()[..., None], largest

    def truth(self, given: Attended) -> tuple[Tensor, ...]:
        weights = given.scores64(given.keys).exp()
        return weights.sum(3, keepdim=True), weights.amax(3, keepdim=True)

    def moved(self, given: Attended) -> int:
        sums = 2 * 4 * given.queries[..., 0].numel()
        return size(given.queries) + given.bytes_of_columns(given.keys) + sums

    def arithmetic(self, given: Attended) -> int:
        return 2 * given.queries.numel() * self.length


@dataclass(frozen=True, kw_only=True)
class Mixed(Attended):
    """With values. `visible`: the columns from the first on that each row sees."""

    values: Tensor
    sink_values: Tensor | None = None
    visible: Tensor | None = None

    def true(self) -> Tensor:
        """[batch, heads, rows, head_dim]: zeros where a row sees nothing."""
        scores = self.scores64(self.keys)
        if self.visible is not None:
            columns = torch.arange(self.keys.shape[2], device=scores.device)
            hidden = columns >= self.visible[:, None, :, None]
            scores[..., -len(columns) :].masked_fill_(hidden, -torch.inf)
        group = self.queries.shape[1] // self.keys.shape[1]
        values = self.values.double().repeat_interleave(group, dim=1)
        if self.sink_values is not None:
            of_sinks = self.sink_values.double().expand(len(values), -1, -1, -1)
            values = torch.cat([of_sinks, values], dim=2)
        return scores.softmax(3).nan_to_num(0.0) @ values

    @property
    def nbytes(self) -> int:
        """Once each; the result is as large as the queries."""
        others = size(self.sink_keys, self.sink_values, self.visible)
        return 2 * size(self.queries) + self.bytes_of_columns(self.keys, self.values) + others


@dataclass(frozen=True, kw_only=True)
class _Mixing(AttentionCase[Mixed]):
    @property
    def bound(self) -> float:
        return max(SUMS, 2 * ROUNDING[self.dtype])  # weights are rounded to the dtype as well

    def moved(self, given: Mixed) -> int:
        return given.nbytes

    def arithmetic(self, given: Mixed) -> int:
        return 4 * given.queries.numel() * self.length


@dataclass(frozen=True, kw_only=True)
class CappedAttention(_Mixing):
    """`partly`: a row sees the first columns only; the first row of each sequence all of them, the last none."""

    kernel: ClassVar[str] = "capped_attention"
    partly: bool = False

    @property
    def name(self) -> str:
        return super().name + (" partly" if self.partly else "")

    def draw(self, generator: torch.Generator) -> Mixed:
        given = self.attended(generator)
        most = torch.randint(self.length, (self.batch, self.rows), generator=generator, device=generator.device)
        most[:, 0], most[:, -1] = self.length, 0
        return Mixed(
            queries=given.queries,
            keys=given.keys,
            key_mask=given.key_mask,
            soft_cap=given.soft_cap,
            sink_keys=self.of_sinks(generator),
            values=self.cached(generator),
            sink_values=self.of_sinks(generator),
            visible=most if self.partly else None,
        )

    def run(self, given: Mixed, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = op(self.kernel)(
            given.queries,
            given.keys,
            given.values,
            soft_cap=given.soft_cap,
            sink_keys=given.sink_keys,
            sink_values=given.sink_values,
            key_mask=given.key_mask,
            visible=given.visible,
        )
        return (found,)

    def truth(self, given: Mixed) -> tuple[Tensor, ...]:
        return (given.true(),)


@dataclass(frozen=True, kw_only=True)
class BlockAttention(_Mixing):
    """As a model without a cap does it: by torch."""

    kernel: ClassVar[str] = "attend"
    triton: ClassVar[bool] = False

    def draw(self, generator: torch.Generator) -> Mixed:
        return Mixed(
            queries=self.queries(generator),
            keys=self.cached(generator),  # numbers at the pads too: torch multiplies values there by 0
            key_mask=self.mask(generator.device) if self.masked else None,
            values=self.cached(generator),
        )

    def run(self, given: Mixed, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mask = None if given.key_mask is None else given.key_mask[:, None, None]
        return (attend(given.queries, given.keys, given.values, mask),)

    def truth(self, given: Mixed) -> tuple[Tensor, ...]:
        return (given.true().transpose(1, 2).flatten(2),)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_CHECKED: dict[str, Any] = {"length": CHECKED_KEYS}
_TIMED: dict[str, Any] = {"length": TIMED_KEYS, "dtype": _BF16, "masked": True}
CHECKED: tuple[KernelCase[Any], ...] = (
    ProxyAttention(shape=LLADA, batch=2, rows=65, dtype=_BF16, masked=True, **_CHECKED),
    ProxyAttention(shape=DREAM, rows=65, dtype=_BF16, masked=True, strided=True, **_CHECKED),
    ProxyAttention(shape=GIDD, rows=65, dtype=_FP16, soft_cap=SOFT_CAP, **_CHECKED),
    ProxyAttention(shape=DREAM, batch=2, rows=9, dtype=_FP32, masked=True, strided=True, **_CHECKED),
    BlockAttention(shape=DREAM, batch=2, rows=32, dtype=_BF16, masked=True, strided=True, **_CHECKED),
    CappedAttention(
        shape=GIDD, batch=2, rows=32, dtype=_BF16, masked=True, partly=True, soft_cap=SOFT_CAP, sinks=1, **_CHECKED
    ),
    CappedAttention(shape=GIDD, rows=32, dtype=_FP16, strided=True, partly=True, soft_cap=SOFT_CAP, **_CHECKED),
    CappedAttention(
        shape=DREAM, rows=32, dtype=_FP32, masked=True, strided=True, soft_cap=SOFT_CAP, sinks=2, **_CHECKED
    ),
)
TIMED: tuple[KernelCase[Any], ...] = (
    ProxyAttention(shape=LLADA, rows=TIMED_CLUSTERS, **_TIMED),
    ProxyAttention(shape=LLADA, rows=9, **_TIMED),
    ProxyAttention(shape=DREAM, rows=TIMED_CLUSTERS, **_TIMED),
    CappedAttention(shape=GIDD, rows=32, partly=True, soft_cap=SOFT_CAP, sinks=1, **_TIMED),
    *(
        BlockAttention(shape=LLADA, rows=32, length=length, dtype=_BF16, masked=masked)
        for length in (1024, 4096, 16384, 32768)
        for masked in (False, True)
    ),
)
