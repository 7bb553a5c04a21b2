"""Size classes: whole pages, in sixteenths from a quarter of a MiB on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.offload.size_class import size_class

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "room"),
    [
        (1, 4 * KIB),
        (4 * KIB, 4 * KIB),
        (4 * KIB + 1, 8 * KIB),
        (147588, 148 * KIB),  # 64 rows of LLaDA-8B as deltas
        (255 * KIB, 256 * KIB),
        (256 * KIB, 256 * KIB),
        (256 * KIB + 1, 272 * KIB),  # from here in sixteenths
        (512 * KIB, 512 * KIB),
        (512 * KIB + 1, 544 * KIB),
        (4 * MIB - 1, 4 * MIB),
    ],
)
def test_size_classes(nbytes: int, room: int):
    assert size_class(nbytes) == room


@given(st.integers(1, 64 * MIB))
def test_padding_is_bounded(nbytes: int):
    room = size_class(nbytes)
    assert room % 4096 == 0
    assert 0 <= room - nbytes < (4096 if nbytes <= 256 * KIB else nbytes / 16 + 4096)
    assert size_class(room) == room
    assert size_class(nbytes + 1) >= room
