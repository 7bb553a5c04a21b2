"""Checks of arguments. Errors name the value and the allowed ones."""

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

# Limits of float32, in which logits, norms and rotations are computed. Larger numbers become infinity, smaller ones may
# become 0.
FLOAT32_LEAST, FLOAT32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127

# Names in transformers and vLLM that are not taken, by what does their work here; `core/aliases.py` has those that are.
_ELSEWHERE = {
    "max_length": "max_new_tokens",
    "do_sample": "temperature",
    "ignore_eos": "stop_at_eos",
    "torch_dtype": "dtype",
    "load_in_4bit": "weights",
    "load_in_8bit": "weights",
    "kv_cache_dtype": "kv",
    "gpu_memory_utilization": "memory",
    "max_memory": "memory",
}


def plain_number(value: Any) -> Any:
    """An integer or real number of another library, such as numpy, as a Python number, which does not overflow. Other
    values are returned unchanged."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def plain_real(value: Any) -> Any:
    """`plain_number`, with an int that is too large for torch as a float, if it is in float32's range."""
    value = plain_number(value)
    large = isinstance(value, int) and 2**63 <= abs(value) <= FLOAT32_MOST
    return float(value) if large else value


def check_integer(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raise `TypeError` if `value` is not an int, `ValueError` if it is below `least` or above `most`."""
    allowed = f"an int of at least {least}" if most is None else f"an int from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} = {value!r}; {allowed} is allowed")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} = {value}; {allowed} is allowed")


def check_count(name: str, value: object) -> None:
    """Raise `TypeError` or `ValueError` unless `value` is an int of at least 1, or None."""
    if value is not None:
        check_integer(name, value, least=1)


def check_multiple(name: str, value: int, unit: int, what: str) -> None:
    """Raise `ValueError` if `value` is not a multiple of `unit`; `what`: its name in the error."""
    if value % unit:
        below, above = value // unit * unit, -(-value // unit) * unit
        nearest = f"{below} or {above}" if below else str(above)
        raise ValueError(f"{name} = {value} is not a multiple of {what}; {nearest} would be")


def check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}; True or False is allowed")


def check_number(name: str, value: object, *, least: float, most: float = math.inf) -> None:
    """Raise `TypeError` if `value` is not a number, `ValueError` if it is out of range, not finite, or beyond
    float32."""
    allowed = f"a number from {least:g} to {min(most, FLOAT32_MOST):g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} = {value!r}; {allowed} is allowed")
    # In this form NaN, infinity and an int that is too large for a float fail too.
    if not least <= value <= min(most, FLOAT32_MOST):
        raise ValueError(f"{name} = {value}; {allowed} is allowed")


def check_temperature(name: str, value: object) -> None:
    """As `check_number`, for a number from 0 on whose inverse must be finite unless it is 0."""
    check_number(name, value, least=0.0)
    if isinstance(value, int | float) and 0 < value < FLOAT32_LEAST:
        raise ValueError(f"{name} = {value}; 0, or a number from {FLOAT32_LEAST:g} on, is allowed")


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ValueError:
    """The error for an unknown `name` of a `kind`, with the nearest of `allowed`, in any case, and a list of all."""
    names = sorted(allowed)
    if not names:
        return ValueError(f"{name!r} is no {kind}; there is none")
    near = nearest(name, names)
    guess = f"; did you mean {str(near)!r}?" if near else ";"
    return ValueError(f"unknown {kind} {name!r}{guess} allowed: {', '.join(names)}")


def nearest(name: object, allowed: Iterable[str]) -> str | None:
    """The one of `allowed` that does the work of `name` elsewhere, or is most similar to it, in any case; None if no
    one is."""
    by_lower_case = {known.lower(): known for known in allowed}
    if (ours := _ELSEWHERE.get(str(name))) in by_lower_case:
        return ours
    near = difflib.get_close_matches(str(name).lower(), by_lower_case, n=1)
    return by_lower_case[near[0]] if near else None
