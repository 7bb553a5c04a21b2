"""Bytes of rows in each codec, against the arithmetic of the formats."""

import pytest

from tiered.offload.codec_bytes import Codec


@pytest.mark.parametrize(
    ("codec", "width", "expected"),
    [
        (Codec.RAW, 4096, 8192),
        (Codec.FP8, 4096, 4096 + 4),  # codes, and a scale of one byte in a whole word
        (Codec.NVFP4, 4096, 2048 + 256 + 4),
        (Codec.NVFP4_DELTA, 4096, 2048 + 256 + 4),  # the projection has room in the word of the scale
        (Codec.NVFP4_DELTA, 3584, 1792 + 224 + 4),
        (Codec.NVFP4_DELTA, 32, 2 * 9 + 6),
        (Codec.NVFP4, 17, 2 * 9 + 2),  # 17 elements are two groups of 16
        (Codec.RAW, 17, 17 * 2),
    ],
)
def test_bytes_of_a_row(codec: Codec, width: int, expected: int):
    assert codec.row_bytes(width, 2) == expected


def test_only_raw_depends_on_the_models_dtype():
    sizes = {codec: [codec.row_bytes(64, size) for size in (2, 4)] for codec in Codec}
    assert sizes.pop(Codec.RAW) == [128, 256]
    assert all(narrow == wide for narrow, wide in sizes.values())
