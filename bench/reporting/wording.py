"""Figures as people read them: three digits, and a unit."""

from collections.abc import Sequence

from tiered.core.byte_size import format_bytes

MINUS, DASH, SPACE = "\N{MINUS SIGN}", "\N{EN DASH}", "\N{NO-BREAK SPACE}"
MARK = "\x00"  # a backtick within a name


def plain(figure: float | None) -> str:
    """Three digits; a dash for none."""
    if figure is None:
        return DASH
    size = abs(figure)
    if size >= 1e6 or 0 < size < 1e-3:
        mantissa, exponent = f"{figure:.2e}".split("e")
        return f"{mantissa}·10{_raised(int(exponent))}".replace("-", MINUS)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{figure:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", MINUS)


def percent(share: float | None) -> str:
    """A share in per cent, with one digit behind the point."""
    return DASH if share is None else f"{100 * share:.1f}".removesuffix(".0").replace("-", MINUS) + f"{SPACE}%"


def nbytes(size: float | None) -> str:
    """Bytes in a binary unit, three digits."""
    if size is None:
        return DASH
    value, unit = format_bytes(round(size)).split()
    return f"{plain(float(value))}{SPACE}{unit}".replace("-", MINUS)


def milliseconds(time: float | None) -> str:
    """A time in milliseconds."""
    return DASH if time is None else f"{plain(time)}{SPACE}ms"


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def counted(number: int, noun: str) -> str:
    """`1 point`, `2 points`."""
    ending = "" if number == 1 else "es" if noun.endswith("sh") else "s"
    return f"{number} {noun}{ending}"


def byte_unit(most: float) -> tuple[float, str]:
    """The binary unit for figures of up to `most` bytes, and its bytes."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    number = next((number for number in range(len(units) - 1) if most < 1024 ** (number + 1)), len(units) - 1)
    return 1024.0**number, units[number]


def named(name: str) -> str:
    """A name within a sentence: between backticks, which pages show as code."""
    return f"`{name.replace('`', MARK)}`"


def without_marks(sentence: str) -> str:
    """A sentence where names cannot be shown as code."""
    return sentence.replace("`", "").replace(MARK, "`")


def pieces(sentence: str) -> list[tuple[str, bool]]:
    """A sentence in pieces, and whether each is a name."""
    parts = sentence.split("`")
    return [(part.replace(MARK, "`"), bool(number % 2)) for number, part in enumerate(parts) if part]


def confidence_name(confidence: float | None) -> str:
    """The commit rule that a confidence threshold stands for; None: there is none."""
    return "one token a step" if confidence is None else f"threshold {confidence:g}"


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
