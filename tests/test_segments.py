"""The bytes of weights in torch's caching allocator are booked: its published rules, played through for a load."""

from collections.abc import Iterator
from functools import cache
from math import prod

import pytest

from tiered.forward.weight_bytes import WeightBytes
from tiered.models.families import family_of
from tiered.models.locate import read_config
from tiered.models.shape import ModelShape
from tiered.models.weight_form import CODES, WeightForm, beside_layers, places, weight_bytes
from tiered.offload.segments import reserved_bytes

MIB = 1 << 20
FORMS = ("raw", *CODES, "int8+head", "nvfp4+head")


class CachingAllocator:
    """A pool of segments for small blocks and one for large ones: the best free block is split, neighbours merge."""

    def __init__(self) -> None:
        self._segments: list[tuple[bool, list[list[int]]]] = []  # whether small, and [bytes, in use] of each block

    def allocate(self, nbytes: int) -> list[int]:
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        free = [
            (block[0], number, place)
            for number, (kind, blocks) in enumerate(self._segments)
            for place, block in enumerate(blocks)
            if kind == small and not block[1] and block[0] >= size
        ]
        if free:
            _, number, place = min(free)
        else:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self._segments.append((small, [[segment, 0]]))
            number, place = len(self._segments) - 1, 0
        blocks = self._segments[number][1]
        block, left = blocks[place], blocks[place][0] - size
        if left >= 512 if small else left > MIB:
            block[0] = size
            blocks.insert(place + 1, [left, 0])
        block[1] = 1
        return block

    def free(self, block: list[int]) -> None:
        block[1] = 0
        for _, blocks in self._segments:
            for place in range(len(blocks) - 1, 0, -1):
                if not blocks[place][1] and not blocks[place - 1][1]:
                    blocks[place - 1][0] += blocks.pop(place)[0]

    @property
    def reserved(self) -> int:
        """Bytes of segments in use; others are freed if memory is short."""
        return sum(block[0] for _, blocks in self._segments if any(each[1] for each in blocks) for block in blocks)


@cache
def shape_of(preset: str) -> ModelShape:
    config = read_config(preset)
    return family_of(config).shape(config)


def load(shape: ModelShape, form: WeightForm, records: bool) -> Iterator[tuple[int, bool]]:
    """Bytes of each allocation of a load, and whether it stays: with `records`, matrices of a layer in one piece."""
    # Experts come one by one.
    pieces = {name: shape.experts.count for name in shape.matrices if shape.experts and name.startswith("experts_")}
    matrices = [
        (form.matrix_bytes(matrix, 2), prod(matrix) * 2 // pieces.get(name, 1))
        for name, matrix in shape.matrices.items()
    ]
    beside = beside_layers(shape, "bfloat16", form)
    if records:
        yield from [(places(shape, "bfloat16", form)[1], True)] * len(shape.recorded)
    for layer in range(shape.layers):
        for kept, raw in matrices:
            if form.code:
                yield raw, False
            if not records:
                yield kept, True
        yield from ((nbytes, True) for nbytes in beside[layer :: shape.layers])


def reserved(shape: ModelShape, form: WeightForm, *, records: bool = True) -> int:
    allocator, passing = CachingAllocator(), []
    for nbytes, stays in load(shape, form, records):
        while passing:
            allocator.free(passing.pop())
        block = allocator.allocate(nbytes)
        if not stays:
            passing.append(block)
    return allocator.reserved


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "preset", ["llada-8b", "dream-7b", "sdar-8b", "llada-moe-7b", "llada2-mini", "nemotron-8b", "gidd-unif-3b"]
)
def test_weights_take_no_more_of_a_gpu_than_is_booked(preset: str, form: str):
    shape, kept = shape_of(preset), WeightForm.of(form)
    exact = WeightBytes.of(shape, "bfloat16", kept)
    booked = WeightBytes.of(shape, "bfloat16", kept, gpu=True)
    assert exact.whole == weight_bytes(shape, "bfloat16", kept) <= booked.whole <= 1.02 * exact.whole
    assert reserved(shape, kept) <= 1.01 * booked.whole
    streamed = booked.streaming(booked.most).resident
    assert reserved_bytes(beside_layers(shape, "bfloat16", kept)) <= streamed


def test_matrices_by_themselves_would_take_more():
    shape, form = shape_of("llada-8b"), WeightForm.of("int8")
    assert reserved(shape, form, records=False) > 1.03 * WeightBytes.of(shape, "bfloat16", form, gpu=True).whole


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], 0),
        ([1], 2 * MIB),
        ([MIB] * 3, 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB] * 3, 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1, 300 * MIB], 312 * MIB),
    ],
)
def test_segments_of_sizes(sizes: list[int], expected: int):
    assert reserved_bytes(sizes) == expected
