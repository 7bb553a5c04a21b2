"""The figure of drift: how far centroids' attention moved since their last update, by layer and forward."""

from math import log10
from typing import Any

from markupsafe import Markup

from reporting.colours import shade
from reporting.figure import Cell, Figure, Group, Table, missing
from reporting.grid_panel import ramp_panel
from reporting.skips import Source
from reporting.svg import Panel, element, text
from reporting.wording import named, plain

NAME, TOPIC = "drift", "Drift by layer and forward"
HINT = "python bench/memory.py writes it, of calls whose policy measures drift."
LEFT, TOP = 62.0, 8.0


def drift_figures(memory: Source) -> list[Figure]:
    """One figure, with a panel for every call that has drift."""
    calls = [call for call in memory.rows if call["drift"]]
    if not calls:
        return [missing(NAME, TOPIC, memory.gap or f"{memory.file} has no call with drift", HINT)]
    figures = [row["mean"] for call in calls for row in call["drift"]]
    positive = [figure for figure in figures if figure > 0]
    low, high = (min(positive), max(positive)) if positive else (0.0, 0.0)
    by_ratio = bool(positive) and high > 30 * low
    if by_ratio:
        low = max(low, high / 1e6)
    legend = ramp_panel(
        "drift", (plain(low if by_ratio else 0.0), plain(high)), "KL" + (", by ratio" if by_ratio else "")
    )

    def share(mean: float) -> float:
        if not by_ratio:
            return mean / (high or 1)
        return 0.0 if mean <= low else log10(mean / low) / log10(high / low)

    groups = [
        Group(
            title=call["name"],
            panels=[_panel(call, 946.0, share), *([legend] if not number else [])],
            narrow=[_panel(call, 370.0, share), *([legend] if not number else [])],
            open=number < 2,
        )
        for number, call in enumerate(calls)
    ]
    figure = Figure(
        name=NAME,
        topic=TOPIC,
        headline=_sentence(calls[0]),
        caption="Mean over clusters of the KL divergence of a centroid's attention from that at its last update. "
        "Without a square nothing was measured: there was no update.",
        groups=groups,
        tables=[_table(call) for call in calls],
        sources=[memory.file],
    )
    return [figure]


def _by_layer(call: dict[str, Any]) -> dict[int, float]:
    layers: dict[int, list[float]] = {}
    for row in call["drift"]:
        layers.setdefault(row["layer"], []).append(row["mean"])
    return {layer: sum(means) / len(means) for layer, means in sorted(layers.items())}


def _sentence(call: dict[str, Any]) -> str:
    means = _by_layer(call)
    most, least = max(means, key=lambda layer: means[layer]), min(means, key=lambda layer: means[layer])
    highest, lowest = plain(means[most]), plain(means[least])
    if most == least:
        return f"In {named(call['name'])}, layer {most} drifts by a KL of {highest} on average."
    return (
        f"In {named(call['name'])}, layer {most} drifts most, by a KL of {highest} on average; layer "
        f"{least} least, by {lowest}."
    )


def _panel(call: dict[str, Any], width: float, share: Any) -> Panel:
    layers = sorted({row["layer"] for row in call["drift"]})
    last = max([*(row["forward"] for row in call["drift"]), *(sample["forward"] for sample in call["timeline"])])
    line = 22.0 if len(layers) <= 16 else 352.0 / len(layers)
    step = (width - LEFT - 6) / (last + 1)
    bottom = TOP + line * len(layers)
    back = {"x": LEFT, "y": TOP, "width": step * (last + 1), "height": bottom - TOP}
    parts = [element("rect", **back, fill="var(--grid)", rx=2)]
    every = max(1, -(-len(layers) // 16))
    for number, layer in enumerate(layers):
        if number % every == 0:
            at = TOP + line * (number + 0.5) + 4
            parts.append(text(LEFT - 8, at, f"layer {layer}", size=11, fill="var(--soft)", anchor="end"))
    for row in call["drift"]:
        where = f"layer {row['layer']}, forward {row['forward']}"
        tip = f"{where}\nmean {plain(row['mean'])}\nlargest {plain(row['largest'])}"
        x, y = LEFT + step * row["forward"], TOP + line * layers.index(row["layer"])
        gap = min(1.0, 0.1 * step)
        box = {"x": x + gap / 2, "y": y + 0.5, "width": step - gap, "height": line - 1}
        paint = shade("drift", share(row["mean"]))[0]
        parts.append(element("rect", **box, fill=paint, class_="mark", data_tip=tip, data_value=row["mean"]))
    ticks = max(1, -(-(last + 1) // 8))
    for forward in range(0, last + 1, ticks):
        at = LEFT + step * (forward + 0.5)
        parts.append(text(at, bottom + 16, str(forward), size=11, fill="var(--soft)", anchor="middle"))
    parts.append(text(LEFT + step * (last + 1) / 2, bottom + 34, "forward", fill="var(--soft)", anchor="middle"))
    label = f"drift by layer and forward of {call['name']}; the table below has the figures"
    return Panel(width=width, height=bottom + 40, body=Markup("").join(parts), label=label)


def _table(call: dict[str, Any]) -> Table:
    rows = [
        [
            Cell(str(row["forward"]), row["forward"]),
            Cell(str(row["layer"]), row["layer"]),
            Cell(plain(row["mean"]), row["mean"]),
            Cell(plain(row["largest"]), row["largest"]),
        ]
        for row in call["drift"]
    ]
    return Table(name=call["name"], columns=("forward", "layer", "mean KL", "largest KL"), rows=rows)
