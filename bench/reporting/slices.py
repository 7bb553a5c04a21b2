"""Points that differ in C, M and T alone, and what each of the three does to a figure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from reporting.points import Point
from reporting.wording import confidence_name

Figure = Callable[[Point], float | None]
KNOBS: dict[str, Callable[[Point], Any]] = {
    "C": lambda point: point.clusters,
    "M": lambda point: point.settings["top_m"],
    "T": lambda point: point.settings["update_threshold"],
}
_OWN = ("clusters", "top_m", "update_threshold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Points with all settings alike but C, M and T. `title`: those settings."""

    title: str
    points: list[Point]

    def levels(self, knob: str) -> list[Any]:
        """All values of "C", "M" or "T": numbers by size, then "auto"."""
        return sorted(
            {KNOBS[knob](point) for point in self.points}, key=lambda x: (isinstance(x, str), x is None, x or 0)
        )

    def at(self, **levels: Any) -> Point | None:
        """The point with these values of C, M and T; None: it was not asked for."""
        return next((p for p in self.points if all(KNOBS[k](p) == value for k, value in levels.items())), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a knob does to a figure: its mean at each level, over the other knobs' values that all levels have."""

    knob: str
    means: dict[Any, float]

    @property
    def size(self) -> float:
        """From the smallest mean to the largest."""
        return max(self.means.values()) - min(self.means.values())


def slices_of(points: Iterable[Point]) -> list[Slice]:
    """Slices with at least two values of C, M or T; the one with most figures first."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        if point.settings["update_threshold"] is not None:
            groups.setdefault(_key(point), []).append(point)
    slices = [Slice(title=_title(group[0]), points=group) for group in groups.values()]
    slices = [each for each in slices if any(len(each.levels(knob)) > 1 for knob in KNOBS)]
    return sorted(slices, key=lambda each: -sum(point.status == "ok" for point in each.points))


def effects(points: Slice, figure: Figure) -> list[Effect]:
    """Of each knob that has one, the largest first."""
    figures = {tuple(of(p) for of in KNOBS.values()): f for p in points.points if (f := figure(p)) is not None}
    found = []
    for place, knob in enumerate(KNOBS):
        levels = [level for level in points.levels(knob) if any(key[place] == level for key in figures)]
        rests = [{(*key[:place], *key[place + 1 :]) for key in figures if key[place] == level} for level in levels]
        common = set.intersection(*rests) if len(rests) > 1 else set()
        if common:
            means = {
                level: sum(figures[*rest[:place], level, *rest[place:]] for rest in common) / len(common)
                for level in levels
            }
            found.append(Effect(knob=knob, means=means))
    return sorted(found, key=lambda effect: -effect.size)


def _key(point: Point) -> tuple[Any, ...]:
    rest = {name: value for name, value in point.settings.items() if name not in (*_OWN, "policy_options")}
    options = {name: value for name, value in point.options.items() if name not in _OWN}
    return (*rest.values(), repr(sorted(options.items(), key=lambda item: item[0])))


def _title(point: Point) -> str:
    settings = point.settings
    options = {name: value for name, value in point.options.items() if name not in (*_OWN, "codec")}
    parts = [
        settings["policy"],
        settings["codec"],
        f"lookup prompts of {settings['context']} tokens",
        "one sequence a call" if settings["batch"] == 1 else f"{settings['batch']} sequences a call",
        f"budget {settings['budget']}" if settings["budget"] else "no budget",
        confidence_name(settings["confidence"]),
        *(f"{name} {value}" for name, value in options.items()),
    ]
    return ", ".join(part for part in parts if part)
