"""Cases of what moves bytes and computes nothing: rows into a store, segments over the bus."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gpu_parts.attention_inputs import CHECKED_KEYS, TIMED_KEYS
from gpu_parts.kernel_case import KernelCase, dtype_name, normal, op, random_bytes, shuffled, size

_RECORD = 147_584  # bytes of 64 rows of LLaDA-8B
_INVALID = 0.3  # share of rows that do not count, where there are flags


@dataclass(frozen=True, kw_only=True)
class Scattered:
    """`index`, [batch, rows], of columns that are distinct where `valid`."""

    store: Tensor
    values: Tensor
    index: Tensor
    valid: Tensor | None


@dataclass(frozen=True, kw_only=True)
class ScatterRows(KernelCase[Scattered]):
    """Into the last of `layers` of a store [layers, batch, heads, length, elements]; no other byte of it may change."""

    kernel: ClassVar[str] = "scatter_rows"
    layers: int = 2
    batch: int = 2
    heads: int
    length: int
    elements: int
    rows: int
    dtype: torch.dtype
    masked: bool = False

    @property
    def name(self) -> str:
        sizes = f"{self.batch}x{self.heads}x{self.rows}of{self.length}x{self.elements}"
        return f"{self.kernel} {sizes} {dtype_name(self.dtype)}" + (" masked" if self.masked else "")

    @property
    def bound(self) -> float:
        return 0.0

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
        return Scattered(
            store=normal(generator, *sizes, dtype=self.dtype),
            values=values.transpose(1, 2),  # as a projection leaves them
            index=index,
            valid=valid,
        )

    def room(self, given: Scattered) -> tuple[Tensor, ...]:
        return (given.store.clone(),)

    def run(self, given: Scattered, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        op(self.kernel)(room[0][-1], given.values, given.index, given.valid)
        return (room[0],)

    def truth(self, given: Scattered) -> tuple[Tensor, ...]:
        return tuple(store.double() for store in self.law(given))

    def law(self, given: Scattered) -> tuple[Tensor, ...]:
        store = given.store.clone()
        for b, columns in enumerate(given.index.tolist()):
            for r, column in enumerate(columns):
                if given.valid is None or given.valid[b, r]:
                    store[-1, b, :, column] = given.values[b, :, r]
        return (store,)

    def moved(self, given: Scattered) -> int:
        count = given.index.numel() if given.valid is None else int(given.valid.sum())
        return 2 * count * size(given.values[0, :, 0]) + size(given.index, given.valid)


@dataclass(frozen=True, kw_only=True)
class Segmented:
    """Offsets and sizes on the device, buffers on either side of the bus."""

    source: Tensor
    destination: Tensor
    starts: Tensor
    places: Tensor
    sizes: Tensor


@dataclass(frozen=True, kw_only=True)
class GatherCopy(KernelCase[Segmented]):
    """Segments of unequal sizes, out of order, with gaps; `down`: to pinned host memory, else from it."""

    kernel: ClassVar[str] = "gather_copy"
    segments: int
    largest: int = _RECORD
    down: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.segments}x{self.largest} " + ("down" if self.down else "up")

    @property
    def bound(self) -> float:
        return 0.0

    def tiny(self) -> Self:
        return replace(self, segments=3, largest=64)

    def draw(self, generator: torch.Generator) -> Segmented:
        device, words = generator.device, self.largest // 16
        # The first is the largest, the next the smallest.
        counts = torch.randint(1, words + 1, (self.segments,), generator=generator, device=device).tolist()
        sizes = [16 * count for count in [words, 1, *counts][: self.segments]]
        rooms = [nbytes + 16 * (k % 2) for k, nbytes in enumerate(sizes)]
        sides = []
        for _ in range(2):
            order = shuffled(generator, self.segments).tolist()
            at = dict(zip(order, accumulate((rooms[k] for k in order), initial=16), strict=False))
            sides.append([at[k] for k in range(self.segments)])
        starts, places, given = torch.tensor([*sides, sizes]).to(device)
        source, destination = (random_bytes(generator, 16 + sum(rooms)) for _ in range(2))
        if device.type == "cuda":
            source, destination = _pinned(source, not self.down), _pinned(destination, self.down)
        return Segmented(source=source, destination=destination, starts=starts, places=places, sizes=given)

    def room(self, given: Segmented) -> tuple[Tensor, ...]:
        copy = given.destination.clone()
        return (copy.pin_memory() if given.destination.is_pinned() else copy,)

    def run(self, given: Segmented, room: Sequence[Tensor]) -> tuple[Tensor, ...]:
        op(self.kernel)(given.source, given.starts, room[0], given.places, given.sizes)
        return (room[0],)

    def truth(self, given: Segmented) -> tuple[Tensor, ...]:
        return tuple(part.double() for part in self.law(given))

    def law(self, given: Segmented) -> tuple[Tensor, ...]:
        source, expected = given.source.cpu(), given.destination.cpu().clone()
        for start, place, nbytes in zip(*(part.tolist() for part in self._lists(given)), strict=True):
            expected[place : place + nbytes] = source[start : start + nbytes]
        return (expected,)

    def moved(self, given: Segmented) -> int:
        return 2 * int(given.sizes.sum()) + size(*self._lists(given))

    def _lists(self, given: Segmented) -> tuple[Tensor, ...]:
        return given.starts, given.places, given.sizes


def _pinned(tensor: Tensor, wanted: bool) -> Tensor:
    return tensor.cpu().pin_memory() if wanted else tensor


CHECKED: tuple[KernelCase[Any], ...] = (
    ScatterRows(heads=32, length=CHECKED_KEYS, elements=128, rows=257, dtype=torch.bfloat16, masked=True),
    ScatterRows(heads=1, length=CHECKED_KEYS, elements=4096, rows=257, dtype=torch.bfloat16),
    ScatterRows(heads=4, length=CHECKED_KEYS, elements=75, rows=257, dtype=torch.float32, masked=True),
    GatherCopy(segments=40),
    GatherCopy(segments=40, down=True),
)
TIMED: tuple[KernelCase[Any], ...] = (
    ScatterRows(
        layers=1, batch=1, heads=32, length=TIMED_KEYS, elements=128, rows=257, dtype=torch.bfloat16, masked=True
    ),
)
