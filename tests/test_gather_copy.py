"""Segments of bytes copied by a few programs, and the books that refuse a wrong copy."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiered.kernels import gather_copy_ref
from tiered.kernels.byte_segments import check_segments

TILE = 8 * 4096  # bytes that a program copies at a time


def copy(implementation: str) -> Callable[..., None]:
    if implementation == "reference":
        return gather_copy_ref.gather_copy
    pytest.importorskip("triton")
    from tiered.kernels import gather_copy

    return gather_copy.gather_copy


# The reference anywhere; the Triton kernel on a GPU where there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
# Source offset, destination offset and size of each segment.
SEGMENTS = {
    "one": [(0, 0, 16)],
    "none": [],
    "an empty one": [(0, 0, 0), (16, 32, 48), (0, 48, 0)],
    "in another order": [(64, 0, 32), (0, 96, 64), (160, 32, 16)],
    "one read twice": [(16, 0, 64), (16, 64, 64)],
    "a tile and more": [(16, 32, TILE + 16), (0, TILE + 64, TILE), (TILE, 2 * TILE + 64, TILE - 16)],
    "many tiles": [(16, 16, 5 * TILE + 48)],
    "more segments than programs": [(i * 32, (12 - i) * 48, 32) for i in range(13)],
}


def device_of(implementation: str) -> str:
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def columns(segments: list[tuple[int, int, int]], device: str) -> tuple[Tensor, Tensor, Tensor]:
    table = torch.tensor(segments, dtype=torch.int64, device=device).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def buffers(segments: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Source, destination and what the destination must be; both just large enough, every byte of the source random."""
    generator = torch.Generator().manual_seed(0)
    source_bytes = max((start + size for start, _, size in segments), default=16)
    destination_bytes = max((place + size for _, place, size in segments), default=16)
    source = torch.randint(0, 256, (source_bytes,), dtype=torch.uint8, generator=generator)
    destination = torch.randint(0, 256, (destination_bytes,), dtype=torch.uint8, generator=generator)
    wanted = bytearray(destination.tolist())
    held = bytes(source.tolist())
    for start, place, size in segments:
        wanted[place : place + size] = held[start : start + size]
    return source, destination, torch.tensor(list(wanted), dtype=torch.uint8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("programs", [1, 3, 4])
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_arrive_and_nothing_else_changes(implementation: str, programs: int, name: str):
    device = device_of(implementation)
    source, destination, wanted = (tensor.to(device) for tensor in buffers(SEGMENTS[name]))
    before = source.clone()
    starts, places, sizes = columns(SEGMENTS[name], device)
    copy(implementation)(source, starts, destination, places, sizes, programs=programs)
    assert torch.equal(destination, wanted)
    assert torch.equal(source, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lists_with_a_stride(implementation: str):
    """The three lists are columns of one table."""
    device = device_of(implementation)
    source, destination, wanted = (tensor.to(device) for tensor in buffers(SEGMENTS["in another order"]))
    starts, places, sizes = columns(SEGMENTS["in another order"], device)
    copy(implementation)(source, starts, destination, places, sizes)
    assert torch.equal(destination, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(8, 0, 16)], r"source_offsets\[0\] = 8; multiples of 16"),
        ([(0, 0, 16), (0, 24, 16)], r"destination_offsets\[1\] = 24; multiples of 16"),
        ([(0, 0, 40)], r"sizes\[0\] = 40; multiples of 16"),
        ([(-16, 0, 16)], r"source_offsets\[0\] = -16"),
        ([(112, 0, 32)], "ends at byte 144 of a source of 128 bytes"),
        ([(0, 48, 32)], "ends at byte 80 of a destination of 64 bytes"),
        ([(0, 16, 32), (64, 32, 16)], "overlap: 32 bytes at 16 and more at 32"),
    ],
)
def test_a_wrong_copy_is_refused_before_it_begins(
    implementation: str, segments: list[tuple[int, int, int]], message: str
):
    source, destination = torch.ones(128, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    starts, places, sizes = columns(segments, "cpu")
    with pytest.raises(ValueError, match=message):
        copy(implementation)(source, starts, destination, places, sizes)
    assert not destination.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wrong_arguments_are_refused(implementation: str):
    whole, part = torch.zeros(64, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)[::2]
    lists = columns([(0, 0, 16)], "cpu")
    starts, places, sizes = lists
    with pytest.raises(ValueError, match="programs = 0; 1 or more"):
        copy(implementation)(whole, starts, whole.clone(), places, sizes, programs=0)
    with pytest.raises(ValueError, match="contiguous"):
        copy(implementation)(part, starts, whole, places, sizes)
    with pytest.raises(ValueError, match="contiguous"):
        copy(implementation)(whole, starts, part, places, sizes)
    with pytest.raises(ValueError, match="one of each"):
        copy(implementation)(whole, torch.cat([starts, starts]), whole.clone(), places, sizes)


@pytest.mark.parametrize("name", ["source", "destination"])
def test_a_buffer_that_is_not_aligned_is_refused(name: str):
    pieces = {"source": torch.zeros(64, dtype=torch.uint8), "destination": torch.zeros(64, dtype=torch.uint8)}
    pieces[name] = torch.zeros(72, dtype=torch.uint8)[8:]
    starts, places, sizes = columns([(0, 0, 16)], "cpu")
    with pytest.raises(ValueError, match=f"the {name} lies at address"):
        copy("triton")(pieces["source"], starts, pieces["destination"], places, sizes)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=5))
def test_overlaps_are_found(pieces: list[tuple[int, int]]):
    """Against the set of 16-byte words that each destination covers."""
    words = [word for place, size in pieces for word in range(place, place + size)]
    sizes, places = [16 * size for _, size in pieces], [16 * place for place, _ in pieces]
    limits = {"source_bytes": 48, "destination_bytes": 144}
    if len(words) == len(set(words)):
        check_segments([0] * len(pieces), places, sizes, **limits)
    else:
        with pytest.raises(ValueError, match="overlap"):
            check_segments([0] * len(pieces), places, sizes, **limits)


@pytest.mark.gpu
@pytest.mark.parametrize("to_device", [True, False])
def test_pinned_memory_is_copied_by_its_address(to_device: bool):
    segments = SEGMENTS["a tile and more"]
    source, destination, wanted = buffers(segments)
    source = source.pin_memory() if to_device else source.cuda()
    destination = destination.cuda() if to_device else destination.pin_memory()
    starts, places, sizes = columns(segments, "cuda")
    copy("triton")(source, starts, destination, places, sizes)
    torch.cuda.synchronize()
    assert torch.equal(destination.cpu(), wanted)
