"""Byte sizes, and counts, as people write them: `"12GiB"`, `"512 MB"`; an int is a number of bytes."""

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

    A fraction of a byte is dropped. Raises `TypeError` for neither int nor str, `ValueError` for a negative number, and
    for a string, other than "0", that is no number with a known unit.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"a byte size is an int or a string such as '12GiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a byte size cannot be negative: {size}")
        return size
    match = _SIZE.fullmatch(size)
    unit = _UNIT_BY_LOWER_CASE.get(match[2].lower() or "b" * (match[1] == "0")) if match else None
    if match is None or unit is None:
        raise ValueError(f"cannot read {size!r} as a byte size; write a number and one of {', '.join(_UNITS)}")
    return int(Fraction(match[1]) * unit)


def format_bytes(size: int) -> str:
    """`size` bytes in the largest binary unit that keeps it at 1 or more: `format_bytes(1536) == "1.50 KiB"`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_count(number: int) -> str:
    """`number` as parameters are counted, in billions, millions or thousands: 8015581184 is "8.02B"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def enough(size: int) -> str:
    """The least whole number of a unit that holds `size` bytes, as `parse_bytes` reads it: `enough(16 << 20 | 1) ==
    "17MiB"`. It is less than a tenth above."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> power >= 10:
            return f"{-(-size >> power)}{unit}"
    return f"{size}B"
