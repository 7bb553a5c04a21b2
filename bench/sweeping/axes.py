"""The axes of a sweep: how their values are written on a command line."""

from collections.abc import Callable
from typing import Any

from tiered.core.byte_size import parse_bytes

# Axes that are options of policies; a policy without one has no such axis.
OPTION_AXES = ("clusters", "top_m", "update_threshold", "codec")


def parse_values(axis: str, text: str) -> list[Any]:
    """The values in a comma-separated list, each once, in the order given.

    Raises:
        ValueError: names the axis, the value and what is allowed.
    """
    return list(dict.fromkeys(parse_value(axis, value) for value in text.split(",")))


def parse_value(axis: str, text: str) -> Any:
    """One value of `axis`; `ValueError` as in `parse_values`."""
    text = text.strip()
    parse, allowed = _AXES[axis]
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{axis} = {text!r}; allowed: {allowed}") from error


def same(axis: str, first: Any, second: Any) -> bool:
    """Whether two values of `axis` are one: `12MiB` and `12582912` are."""
    if axis == "budget" and first is not None and second is not None:
        return parse_bytes(first) == parse_bytes(second)
    return first == second


def _whole(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise ValueError(text)
    return value


def _named(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _budget(text: str) -> str:
    parse_bytes(text)
    return text


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else parse(text)


_AXES: dict[str, tuple[Callable[[str], Any], str]] = {
    "policy": (_named, "the name of a policy or preset"),
    "clusters": (lambda text: text if text == "auto" else _whole(text, 1), "a whole number from 1, or auto"),
    "top_m": (lambda text: _whole(text, 0), "a whole number from 0"),
    "update_threshold": (lambda text: _whole(text, 0), "a whole number from 0"),
    "codec": (_named, "the name of a codec"),
    "context": (lambda text: _whole(text, 1), "a whole number from 1"),
    "batch": (lambda text: _whole(text, 1), "a whole number from 1"),
    "budget": (_or_none(_budget), "a byte size such as 12MiB, or none"),
    "confidence": (_or_none(_share), "a number from 0 to 1, or none for one token a step"),
}
AXES: tuple[str, ...] = tuple(_AXES)
