"""Books: what a forward reads of a config.json beside the sizes: numbers and ids of special tokens."""

import math
from collections.abc import Mapping


def positive_number(config: Mapping[str, object], key: str, default: float) -> float:
    """`config[key]` as a number; `default` where it is absent.

    Raises:
        ValueError: not a number above 0.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: {key} = {value!r}; a positive number is allowed")
    return float(value)


def finite_number(config: Mapping[str, object], key: str, default: float) -> float:
    """`config[key]` as a number of either sign; `default` where it is absent.

    Raises:
        ValueError: not a finite number.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"config.json: {key} = {value!r}; a finite number is allowed")
    return float(value)


def token_id(config: Mapping[str, object], key: str, vocab_size: int, default: int | None = None) -> int:
    """`config[key]` as a token of the vocabulary; `default` where it is absent.

    Raises:
        ValueError: absent without a default, or no id in [0, `vocab_size`).
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ValueError(f"config.json: {key} = {value!r}; a token id in [0, {vocab_size}) is allowed")
    return value
