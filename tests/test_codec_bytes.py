"""Bytes of rows in each codec, against the arithmetic of the formats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.offload.codec_bytes import Codec, centroid_bytes, codec_bytes

CODECS = st.sampled_from(list(Codec))


@pytest.mark.parametrize(
    ("codec", "rows", "width", "records", "expected"),
    [
        ("raw", 1, 4096, 1, 8192),
        ("fp8", 1, 4096, 1, 4096 + 4),
        ("nvfp4", 64, 4096, 1, 64 * 2304 + 4),
        ("nvfp4_delta", 64, 4096, 1, 64 * (2304 + 2) + 4),
        ("nvfp4", 64, 4096, 8, 64 * 2304 + 8 * 4),
        ("nvfp4_delta", 64, 3584, 2, 64 * (2016 + 2) + 2 * 4),
        ("nvfp4", 3, 17, 1, 3 * 2 * 9 + 4),  # 17 elements are two groups of 16
        ("raw", 3, 17, 3, 3 * 17 * 2),
        ("nvfp4_delta", 0, 4096, 1, 0),
    ],
)
def test_bytes(codec: str, rows: int, width: int, records: int, expected: int):
    assert codec_bytes(codec, rows, width, element_bytes=2, records=records) == expected


def test_only_raw_depends_on_the_models_dtype():
    sizes = {codec: [codec_bytes(codec, 10, 64, element_bytes=size) for size in (2, 4)] for codec in Codec}
    assert sizes.pop(Codec.RAW) == [1280, 2560]
    assert all(narrow == wide for narrow, wide in sizes.values())


@given(CODECS, st.integers(1, 300), st.integers(1, 300), st.integers(1, 600), st.data())
def test_records_can_be_counted_one_by_one(codec: Codec, first: int, second: int, width: int, data: st.DataObject):
    element_bytes = data.draw(st.sampled_from([2, 4]))
    apart = [codec_bytes(codec, rows, width, element_bytes=element_bytes) for rows in (first, second)]
    assert sum(apart) == codec_bytes(codec, first + second, width, element_bytes=element_bytes, records=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int4", 1, 16, 2, 1), f"unknown codec 'int4'; allowed: {', '.join(Codec)}"),
        (("raw", -1, 16, 2, 1), "rows = -1"),
        (("raw", 1, 0, 2, 1), "width = 0"),
        (("raw", 1, 16, 0, 1), "element_bytes = 0"),
        (("nvfp4", 1, 16, 2, 0), "records = 0"),
        (("nvfp4", 3, 16, 2, 4), "3 rows cannot fill 4 records"),
    ],
)
def test_impossible_sizes(arguments: tuple[str, int, int, int, int], message: str):
    codec, rows, width, element_bytes, records = arguments
    with pytest.raises(ValueError, match=message):
        codec_bytes(codec, rows, width, element_bytes=element_bytes, records=records)


def test_centroids_stay_in_the_models_dtype():
    assert centroid_bytes(64, 4096, element_bytes=2) == 64 * 4096 * 2
    assert centroid_bytes(0, 4096, element_bytes=2) == 0
    with pytest.raises(ValueError, match="clusters = -1"):
        centroid_bytes(-1, 4096, element_bytes=2)
