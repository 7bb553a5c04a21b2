"""Cases of kernels that serve several calls at once: their rows are written and read by a table of their stores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, size
from gpu_parts.kernel_cases_attention import CHECKED_KEYS, TIMED_KEYS
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_code import RowCode
from tiered.kernels.store_table import OwnRows, StoreTable

_LAYERS, _LAYER = 2, 1
_KV_HEADS, _SHARING, _HEAD_DIM = 8, 4, 128


class Shared(NamedTuple):
    """`memory`: keys and values of each call [calls, keys and values, layers, 1, heads, length, stored]. `rows`:
    queries, or keys and values, of all calls."""

    memory: Tensor
    rows: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class SharedCase(KernelCase):
    """Calls with memory for `length` columns. The n-th has n columns fewer, and `rows` rows at their end, which read
    the columns in front of them and themselves."""

    calls: int = 8
    rows: int = 32
    length: int = CHECKED_KEYS
    code: RowCode | None = None

    def tiny(self) -> Self:
        return replace(self, calls=2, rows=4, length=37)

    def memory(self, generator: torch.Generator) -> Tensor:
        sizes = self.calls, 2, _LAYERS, 1, _KV_HEADS, self.length, _HEAD_DIM
        values = normal(generator, *sizes, dtype=self.dtype)
        return values if self.code is None else CodedRows.of(values, self.code).bytes.view(self.dtype)

    def ends(self) -> list[int]:
        """The column behind the last of each call."""
        return [self.length - number for number in range(self.calls)]

    def table(self, memory: Tensor) -> StoreTable:
        calls = [
            OwnRows(keys, values, range(end - self.rows, end), [(0, end)] * self.rows)
            for (keys, values), end in zip(memory, self.ends(), strict=True)
        ]
        return StoreTable.of(calls, self.code, _HEAD_DIM)

    def all_rows(self, generator: torch.Generator, heads: int) -> Tensor:
        """Rows of all calls, as a projection leaves them."""
        rows = normal(generator, 1, self.calls * self.rows, heads, _HEAD_DIM, dtype=self.dtype)
        return rows.transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class AttentionApart(SharedCase):
    """Attention of the rows of all calls."""

    kernel = "block_attention"
    error, roundings = 1e-5, 2

    def draw(self, generator: torch.Generator) -> Shared:
        return Shared(self.memory(generator), (self.all_rows(generator, _KV_HEADS * _SHARING),))

    def run(self, given: Shared, room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel, "attention_apart")(*given.rows, self.table(given.memory), _LAYER),)

    def truth(self, given: Shared) -> Sequence[Tensor]:
        found, queries = [], given.rows[0].double().split(self.rows, dim=2)
        stored = self.table(given.memory).stored(_LAYER)
        for own, both, end in zip(queries, stored, self.ends(), strict=True):
            values = (of.values() if isinstance(of, CodedRows) else of for of in both)
            keys, mixed = (of[:, :, :end].double().repeat_interleave(_SHARING, dim=1) for of in values)
            found.append((own @ keys.mT * _HEAD_DIM**-0.5).softmax(-1) @ mixed)
        return (torch.cat(found, dim=2),)

    def moved(self, given: Shared) -> int:
        columns = sum(self.ends()) * 2 * _KV_HEADS * given.memory.shape[-1] * given.memory.element_size()
        return columns + 2 * size(*given.rows)

    def arithmetic(self, given: Shared) -> int:
        return 4 * _KV_HEADS * _SHARING * _HEAD_DIM * self.rows * sum(self.ends())


@dataclass(frozen=True, kw_only=True)
class StoreRows(SharedCase):
    """Keys and values of the rows of all calls, into their columns of one layer; no other byte may change."""

    kernel, into = "store_rows", "memory"

    def draw(self, generator: torch.Generator) -> Shared:
        return Shared(self.memory(generator), [self.all_rows(generator, _KV_HEADS) for _ in range(2)])

    def run(self, given: Shared, room: Sequence[Tensor]) -> Sequence[Tensor]:
        table = self.table(room[0])
        op(self.kernel)(*(table.coded(rows) for rows in given.rows), table, _LAYER)
        return room

    def law(self, given: Shared) -> tuple[Tensor, ...]:
        memory = given.memory.clone()
        table = self.table(memory)
        coded = torch.stack([table.coded(rows)[0] for rows in given.rows])
        for call, own, end in zip(memory, coded.split(self.rows, dim=2), self.ends(), strict=True):
            table.words(call)[:, _LAYER, 0, :, end - self.rows : end] = own
        return (memory,)

    def moved(self, given: Shared) -> int:
        return 2 * size(*given.rows)


CHECKED: tuple[KernelCase, ...] = (
    AttentionApart(),
    *(AttentionApart(code=code) for code in RowCode),
    AttentionApart(rows=4, dtype=torch.float32),
    StoreRows(),
    StoreRows(code=RowCode.FP8),
    StoreRows(rows=5, dtype=torch.float32),
)
TIMED: tuple[KernelCase, ...] = (
    *(AttentionApart(length=TIMED_KEYS, code=code) for code in (None, *RowCode)),
    StoreRows(length=TIMED_KEYS),
)
