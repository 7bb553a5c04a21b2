"""Byte sizes are parsed, refused and formatted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.core.byte_size import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("7B", 7),
        ("12GiB", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512 MB", 512 * 10**6),
        (" 512\tkib\n", 512 * 2**10),
        ("3tib", 3 * 2**40),
        ("3TB", 3 * 10**12),
        ("0.001kB", 1),
        ("1.9B", 1),  # a fraction of a byte is dropped
        ("1.001GB", 1_001_000_000),  # not what a float makes of it
        ("2.001kB", 2001),
        ("9007199254740993B", 2**53 + 1),  # beyond the integers that a float holds
    ],
)
def test_parse(size: int | str, expected: int):
    assert parse_bytes(size) == expected


@pytest.mark.parametrize(
    "size",
    [
        *("", " ", "GiB", "12 GG", "12iB", "12 G iB", "12GiB!", "1 2GiB", "1,5GiB", ".5GiB", "5.GiB"),
        *("24", "00", "1.5", " 4096 "),  # of no unit: bytes, or GiB?
        *("-1GiB", "+1GiB", "nan", "nanGiB", "inf", "1e3", "1_000", "0x10"),
    ],
)
def test_no_byte_size(size: str):
    with pytest.raises(ValueError, match=r"as a byte size; write a number and one of B, KB, .*TiB$"):
        parse_bytes(size)


def test_negative():
    with pytest.raises(ValueError, match="negative: -1"):
        parse_bytes(-1)


@pytest.mark.parametrize("size", [True, False, None, 1.5, float("nan"), b"12GiB", ["12GiB"]])
def test_wrong_type(size: object):
    with pytest.raises(TypeError, match="an int or a string"):
        parse_bytes(size)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (2**30, "1.00 GiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4096.00 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_format(size: int, expected: str):
    assert format_bytes(size) == expected


@given(st.integers(0, 2**50))
def test_a_formatted_size_can_be_parsed(size: int):
    # Two decimals of a number that is 1 or more, and a whole byte.
    assert abs(parse_bytes(format_bytes(size)) - size) <= 0.005 * size + 1
