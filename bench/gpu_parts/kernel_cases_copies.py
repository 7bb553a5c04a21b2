"""Cases of the kernel that moves bytes and computes nothing: rows into a store."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, shuffled, size
from gpu_parts.kernel_cases_attention import CHECKED_KEYS, TIMED_KEYS

_INVALID = 0.3  # share of rows that do not count, if there are flags


class Scattered(NamedTuple):
    """`columns`, [batch, rows], are distinct if `valid`."""

    store: Tensor
    values: Tensor
    columns: Tensor
    valid: Tensor | None


@dataclass(frozen=True, kw_only=True)
class ScatterRows(KernelCase):
    """Rows into the last layer of a store [layers, batch, heads, length, elements]; no other byte may change."""

    kernel, into = "scatter_rows", "store"
    layers: int = 2
    batch: int = 2
    heads: int
    length: int = CHECKED_KEYS
    elements: int
    rows: int = 257
    masked: bool = False

    def tiny(self) -> Self:
        return replace(self, heads=min(2, self.heads), length=37, elements=8 + self.elements % 16, rows=11)

    def draw(self, generator: torch.Generator) -> Scattered:
        sizes = self.layers, self.batch, self.heads, self.length, self.elements
        index = torch.stack([shuffled(generator, self.length)[: self.rows] for _ in range(self.batch)])
        valid = None
        if self.masked:
            valid = torch.rand(index.shape, generator=generator, device=generator.device) >= _INVALID
            index = index.where(valid, index.flip(1))
        values = normal(generator, self.batch, self.rows, self.heads, self.elements, dtype=self.dtype)
        # Values lie as a projection leaves them.
        return Scattered(normal(generator, *sizes, dtype=self.dtype), values.transpose(1, 2), index, valid)

    def run(self, given: Scattered, room: Sequence[Tensor]) -> Sequence[Tensor]:
        op(self.kernel)(room[0][-1], given.values, given.columns, given.valid)
        return room

    def law(self, given: Scattered) -> tuple[Tensor, ...]:
        store = given.store.clone()
        for b, columns in enumerate(given.columns.tolist()):
            for r, column in enumerate(columns):
                if given.valid is None or given.valid[b, r]:
                    store[-1, b, :, column] = given.values[b, :, r]
        return (store,)

    def moved(self, given: Scattered) -> int:
        count = given.columns.numel() if given.valid is None else int(given.valid.sum())
        return 2 * count * size(given.values[0, :, 0]) + size(given.columns, given.valid)


_LLADA: dict[str, Any] = {"heads": 32, "elements": 128, "masked": True}
CHECKED: tuple[KernelCase, ...] = (
    ScatterRows(**_LLADA),
    ScatterRows(heads=1, elements=4096),
    ScatterRows(heads=4, elements=75, dtype=torch.float32, masked=True),
)
TIMED: tuple[KernelCase, ...] = (ScatterRows(layers=1, batch=1, length=TIMED_KEYS, **_LLADA),)
