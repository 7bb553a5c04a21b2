"""The full grid over the axes, as points; axes that a policy does not have are dropped, and duplicates with them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sweeping.axes import OPTION_AXES
from sweeping.point import Common, Point
from tiered.core.aliases import POLICY_ALIASES
from tiered.core.checks import unknown_name
from tiered.policies.registry import POLICIES, PRESETS, make_policy

_CALL_AXES = ("context", "batch", "budget", "confidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values of every axis, options that every policy gets that has them, and what all points share."""

    axes: Mapping[str, Sequence[Any]]
    options: Mapping[str, Any]
    common: Common

    def points(self) -> list[Point]:
        """Every point once, policies in turn within the same call so that what is compared is measured close in time.

        Raises:
            ValueError, TypeError: a policy, an option or a value that there is none of.
        """
        by_policy = {policy: self._option_sets(policy) for policy in self.axes["policy"]}
        self._check_options()
        made: dict[str, Point] = {}
        for context, batch, budget, confidence in itertools.product(*(self.axes[axis] for axis in _CALL_AXES)):
            call: dict[str, Any] = {"context": context, "batch": batch, "budget": budget, "confidence": confidence}
            for policy, option_sets in by_policy.items():
                for options in option_sets:
                    point = Point(policy=policy, options=options, **call, common=self.common)
                    made.setdefault(point.key, point)
        return list(made.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return {
            "axes": {axis: list(values) for axis, values in self.axes.items()},
            "options": dict(self.options),
            "fixed": self.common.settings(),
        }

    def _option_sets(self, policy: str) -> list[dict[str, Any]]:
        """The options of every point of `policy`. What a preset sets is no axis of it."""
        allowed, preset = _options_of(policy)
        axes = [axis for axis in OPTION_AXES if axis in allowed and axis not in preset]
        given = {name: value for name, value in self._named(allowed).items() if name in allowed}
        sets = []
        for values in itertools.product(*(self.axes[axis] for axis in axes)):
            options = given | dict(zip(axes, values, strict=True))
            make_policy(policy, **options)
            sets.append(options)
        return sets

    def _named(self, allowed: Sequence[str]) -> dict[str, Any]:
        return {
            name if name in allowed else POLICY_ALIASES.get(name, name): value for name, value in self.options.items()
        }

    def _check_options(self) -> None:
        """Each option is one of some policy here, and no axis."""
        known = {name for policy in self.axes["policy"] for name in _options_of(policy)[0]}
        for name in self.options:
            if name in OPTION_AXES:
                raise ValueError(f"option {name!r} is an axis; it has a list of its own, --{name.replace('_', '-')}")
            if name not in known and POLICY_ALIASES.get(name) not in known:
                chosen = ", ".join(self.axes["policy"])
                raise unknown_name(f"option of {chosen}", name, sorted(known.difference(OPTION_AXES)))


def _options_of(policy: str) -> tuple[list[str], Mapping[str, Any]]:
    """Names of the options of `policy`, and what it sets of them if it is a preset."""
    kind, preset = PRESETS[policy] if policy in PRESETS else (POLICIES.get(policy), {})
    if kind is None:
        raise unknown_name("policy", policy, (*POLICIES, *PRESETS))
    return [field.name for field in fields(kind)], preset
