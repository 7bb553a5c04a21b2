"""Colours: those of tiers, accounts and kinds of pass, and ramps, for light and for dark pages.

Figures name them as `var(--name)`; a page says what they are, and `resolved` puts them into a file of its own.
"""

import re
from collections.abc import Mapping

STEPS = 16  # of a ramp
Hex = str

_PLAIN: dict[str, tuple[Hex, Hex]] = {
    # name: (light, dark)
    "page": ("#fbfaf7", "#14171a"),
    "card": ("#ffffff", "#1b1f23"),
    "ink": ("#1f2428", "#e6e4df"),
    "soft": ("#5c656d", "#a3abb2"),
    "line": ("#dcd9d2", "#343a40"),
    "grid": ("#edebe5", "#262b30"),
    "accent": ("#0b6e63", "#5ccfbc"),
    "warn": ("#a8480f", "#f0a36b"),
    "blank": ("#e9e7e1", "#2a2f34"),
    "hatch": ("#b9b5ab", "#4d555c"),
    # Tiers, and copy time.
    "device": ("#5b4b9a", "#a899ee"),
    "host": ("#1f7a8c", "#62c3d4"),
    "disk": ("#8a6a3b", "#cfa873"),
    "hidden-time": ("#9ecbc3", "#3b7f76"),
    "exposed-time": ("#c8501e", "#f08a52"),
    # Kinds of pass.
    "refresh": ("#c8501e", "#f08a52"),
    "update": ("#0b6e63", "#5ccfbc"),
    "step": ("#c3c0b8", "#4a5158"),
    # Accounts: what is kept in blues and greens, what passes need in greys.
    "weights": ("#a7a49d", "#6d737a"),
    "key": ("#2f5d8a", "#6fa8dc"),
    "value": ("#7ba7cf", "#3f6f9f"),
    "hidden": ("#0b8a7a", "#4cc4b2"),
    "attn_out": ("#66a182", "#5d9c7a"),
    "ffn_out": ("#a8cbb1", "#3d6b52"),
    "centroids": ("#d99a1c", "#f2bf54"),
    "staging": ("#c8501e", "#f08a52"),
    "spare": ("#e6d9b8", "#5b5237"),
    "logits": ("#b18cc0", "#8d6a9c"),
    "activations": ("#d8d5ce", "#474d54"),
}
_RAMPS: dict[str, tuple[tuple[Hex, ...], tuple[Hex, ...]]] = {
    "accuracy": (("#f3e3b4", "#8fbf9f", "#0b5f57"), ("#5c4a22", "#2f8578", "#8cf0dd")),
    "speed": (("#eaf1f8", "#7fa8d1", "#1d4e80"), ("#1e2a36", "#3a6ea5", "#a9d3ff")),
    "device-use": (("#f0edf9", "#a294d4", "#4b3a8c"), ("#25222f", "#6a5aae", "#cabfff")),
    "moved": (("#fbf0e2", "#e3a75f", "#8f4a0c"), ("#2c251c", "#a8662a", "#ffcf96")),
    "drift": (("#f8eef0", "#d98a9a", "#852541"), ("#2b2024", "#a34a63", "#ffb9c8")),
}
_POLICIES: tuple[tuple[Hex, Hex], ...] = (
    ("#2f5d8a", "#6fa8dc"),
    ("#8a6a3b", "#cfa873"),
    ("#7b4fa3", "#bf9be0"),
    ("#4b7f34", "#93c979"),
    ("#b03a5b", "#ee8aa6"),
    ("#3b7f8c", "#7cc7d4"),
    ("#96610b", "#e0ac55"),
    ("#5a6270", "#a9b2c0"),
    ("#a04f9c", "#df98db"),
    ("#66752a", "#b4c46c"),
)
_KNOWN_POLICIES = {"polestar": "accent", "none": "soft"}


def policy_colours(policies: list[str]) -> dict[str, str]:
    """A variable for each policy: `polestar` and `none` always the same, the others in turn, by name."""
    others = sorted(policy for policy in dict.fromkeys(policies) if policy not in _KNOWN_POLICIES)
    numbered = {policy: f"policy-{number % len(_POLICIES)}" for number, policy in enumerate(others)}
    return {policy: f"var(--{name})" for policy, name in (_KNOWN_POLICIES | numbered).items() if policy in policies}


def variables(*, dark: bool) -> dict[str, Hex]:
    """All colours by name. `ramp-<name>-<n>` is the n-th step of a ramp, `on-<name>-<n>` ink that is read on it."""
    side = int(dark)
    found = {name: pair[side] for name, pair in _PLAIN.items()}
    found |= {f"policy-{number}": pair[side] for number, pair in enumerate(_POLICIES)}
    for name, anchors in _RAMPS.items():
        for number in range(STEPS):
            shade = _between(anchors[side], number / (STEPS - 1))
            found[f"ramp-{name}-{number}"] = shade
            found[f"on-{name}-{number}"] = max(("#000000", "#ffffff"), key=lambda ink: _contrast(ink, shade))
    return found


def shade(ramp: str, share: float) -> tuple[str, str]:
    """Paint, and the ink on it, for a figure at `share` of the ramp, 0 to 1."""
    number = min(STEPS - 1, max(0, round(share * (STEPS - 1))))
    return f"var(--ramp-{ramp}-{number})", f"var(--on-{ramp}-{number})"


def resolved(svg: str, colours: Mapping[str, Hex]) -> str:
    """`svg` with colours in place of their names."""
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], svg)


def _between(anchors: tuple[Hex, ...], share: float) -> Hex:
    """Between neighbouring anchors, in linear light, where middles do not turn grey."""
    place = share * (len(anchors) - 1)
    first = min(int(place), len(anchors) - 2)
    ends = [_linear(anchors[first]), _linear(anchors[first + 1])]
    mixed = [(1 - (place - first)) * a + (place - first) * b for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{round(255 * _curved(value)):02x}" for value in mixed)


def _linear(colour: Hex) -> list[float]:
    """sRGB without its curve, IEC 61966-2-1."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _curved(value: float) -> float:
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055


def _contrast(first: Hex, second: Hex) -> float:
    """WCAG 2.1."""
    light = [sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), _linear(c), strict=True)) for c in (first, second)]
    return (max(light) + 0.05) / (min(light) + 0.05)
