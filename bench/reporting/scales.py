"""Axes: where a figure lies on a length of pixels, and at which round figures there are ticks."""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log10


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From `low`..`high` to `start`..`stop` pixels; `log`: by ratio."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, figure: float) -> float:
        """The pixel of a figure."""
        if self.log:
            share = (log10(figure) - log10(self.low)) / ((log10(self.high) - log10(self.low)) or 1)
        else:
            share = (figure - self.low) / ((self.high - self.low) or 1)
        return self.start + share * (self.stop - self.start)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round figures from `low` to `high`: steps of 1, 2 or 5."""
    if high <= low:
        return [low]
    return _multiples(low, high, lambda raw: _round_up(raw, 10, (1, 2, 5, 10)), most)


def byte_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round figures of bytes: steps of powers of 2."""
    if high <= low:
        return [low]
    return _multiples(low, high, _power_of_two, most)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; fewer where there are many."""
    powers = range(floor(log10(low)), floor(log10(high)) + 1)
    found = [digit * 10.0**power for power in powers for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
    return found if len(found) <= 7 else [tick for tick in found if f"{tick:e}"[0] == "1"]


def padded(figures: list[float], share: float = 0.06) -> tuple[float, float]:
    """Bounds around figures, with room at both ends."""
    low, high = min(figures), max(figures)
    room = share * (high - low) or 0.1 * abs(high) or 1.0
    return max(0.0, low - room) if low >= 0 else low - room, high + room


def _multiples(low: float, high: float, step_of: Callable[[float], float], most: int) -> list[float]:
    step = step_of((high - low) / most)
    first = -floor(-low / step)
    count = floor(high / step) - first + 1
    return [step * (first + number) for number in range(count)]


def _round_up(raw: float, base: int, digits: tuple[int, ...]) -> float:
    power = float(base) ** floor(log10(raw))
    return next((digit * power for digit in digits if digit * power >= raw), base * power)


def _power_of_two(raw: float) -> float:
    step = 1.0
    while step < raw:
        step *= 2
    return step
