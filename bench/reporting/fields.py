"""What a field of a row may hold, and the sentence that says why a row is none."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = {str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field.

    Attributes:
        kind: of its values; a whole number passes for `float`.
        nullable: whether it may be None.
        needed: whether a row without it is none.
        low, high: bounds of a number, both allowed.
        choices: all that a text may be; none given: any.
    """

    kind: type
    nullable: bool = False
    needed: bool = True
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value; None: nothing."""
        if value is None:
            return None if self.nullable else f"null, not {NAMES[self.kind]}"
        kinds = (int, float) if self.kind is float else self.kind
        if isinstance(value, bool) or not isinstance(value, kinds):
            return f"{_short(value)}, not {NAMES[self.kind]}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value}, not a finite number"
        if self.low is not None and value < self.low:
            return f"{value}, less than {self.low:g}"
        if self.high is not None and value > self.high:
            return f"{value}, more than {self.high:g}"
        if self.choices and value not in self.choices:
            return f"{_short(value)}, none of {', '.join(self.choices)}"
        return None


def row_problem(row: Any, fields: Mapping[str, Field]) -> str | None:
    """What is wrong with a row, its first fault; None: nothing. Fields that are not listed may hold anything."""
    if not isinstance(row, dict):
        return f"{_short(row)}, not an object"
    for name, field in fields.items():
        if name not in row:
            if field.needed:
                return f"has no {name}"
        elif fault := field.problem(row[name]):
            return f"{name} is {fault}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
