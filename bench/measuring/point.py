"""A point: all that a measurement depends on, and the name that its content gives it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

_LONGEST_VALUE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measurement that is made once a round.

    Attributes:
        study: name of its module in bench/studies.
        settings: plain types for JSON. Equal settings are one point. Facts of this machine, such as paths, do not
            belong here.
    """

    study: str
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """16 hex digits: the sha256 of study and settings as canonical JSON."""
        text = json.dumps([self.study, self.settings], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a point: all points are measured once before any is measured again."""

    point: Point
    run: int = 0

    @property
    def name(self) -> tuple[str, int]:
        """The name of its rows."""
        return self.point.key, self.run


def words(settings: Mapping[str, Any], *, without: Mapping[str, Any]) -> str:
    """A label of the values of `settings` that differ from those in `without`, mappings one by one, long ones cut."""
    own: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in without or without[name] != value:
            own |= value if isinstance(value, Mapping) else {name: value}
    return " ".join(f"{name}={_short(value)}" for name, value in own.items() if value is not None)


def _short(value: Any) -> str:
    """The first characters of `value`: names and numbers are whole, hashes and lists of tasks are not."""
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
