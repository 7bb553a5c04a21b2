"""Reads and writes byte sizes with units, such as `"12GiB"` or `"512 MB"`, and writes counts."""

import re
from fractions import Fraction

_UNITS = {"B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_UNIT_BY_LOWER_CASE = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Bytes in `size`: an int, or a string with a unit (`GB` = 10^9 bytes, `GiB` = 2^30 bytes; case is ignored).

    A fraction of a byte is dropped.

    Raises:
        TypeError: neither an int nor a str.
        ValueError: a negative number, or a string other than "0" without a known unit.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{size!r} is not a byte size; an int or a string such as '12GiB' is allowed")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a byte size cannot be negative: {size}; 0 or more is allowed")
        return size
    match = _SIZE.fullmatch(size)
    unit = _UNIT_BY_LOWER_CASE.get(match[2].lower() or "b" * (match[1] == "0")) if match else None
    if match is None or unit is None:
        raise ValueError(f"cannot read {size!r} as a byte size; write a number and one of {', '.join(_UNITS)}")
    return int(Fraction(match[1]) * unit)


def format_bytes(size: int) -> str:
    """`size` bytes in the largest binary unit of which it has at least 1: `format_bytes(1536) == "1.50 KiB"`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_count(number: int) -> str:
    """`number` in billions, millions or thousands, as for parameters: 8015581184 is "8.02B"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def enough(size: int) -> str:
    """The least whole number of a unit that is at least `size` bytes, for `parse_bytes`: `enough(16 << 20 | 1) ==
    "17MiB"`. It exceeds `size` by less than a tenth."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> power >= 10:
            return f"{-(-size >> power)}{unit}"
    return f"{size}B"
