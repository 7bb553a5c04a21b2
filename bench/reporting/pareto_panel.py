"""One workload's contenders: device bytes to the right, tokens a second upwards, accuracy as colour."""

from collections.abc import Sequence

from markupsafe import Markup

from reporting.colours import shade
from reporting.contenders import Contender, Workload, frontier
from reporting.labels import Label, placed
from reporting.scales import Scale, byte_ticks, log_ticks, padded, ticks
from reporting.svg import Panel, element, text, width_of
from reporting.wording import nbytes, percent, plain

KINDS = {"sweep": "point of the sweep", "policy": "policy with its defaults", "baseline": "baseline"}
LEFT, TOP, BELOW = 58.0, 14.0, 48.0


def pareto_panel(workload: Workload, width: float, height: float, low: float, high: float) -> Panel:
    """`low` to `high`: accuracies of the ramp."""
    contenders = workload.contenders
    x, y = _scales(contenders, width, height)
    parts = [_axes(x, y)]
    parts.append(_line(frontier(contenders), x, y, stroke="var(--soft)", stroke_width=1.2, stroke_dasharray="1 4"))
    front = frontier(workload.close())
    parts.append(_line(front, x, y, stroke="var(--accent)", stroke_width=1.6, opacity=0.8))
    # The frontier's marks lie on top.
    marks = sorted(contenders, key=lambda who: (who in front, who.kind != "sweep"))
    for who in marks:
        parts.append(_mark(who, workload.accuracy(who), x, y, low, high))
    wanted = [who for who in reversed(marks) if who.kind != "sweep" or who in front]
    taken = [(x(who.nbytes) - 7, y(who.speed.value) - 7, 14.0, 14.0) for who in contenders]
    taken += _walls(front, x, y)
    labels = [Label(x=x(who.nbytes), y=y(who.speed.value), words=who.name, strong=who in front) for who in wanted]
    parts.extend(placed(labels, taken, (LEFT, TOP, width, y.start)))
    label = f"{len(contenders)} contenders: {workload.title}; the table below has the figures"
    return Panel(width=width, height=height, body=Markup("").join(parts), label=label)


def _scales(contenders: Sequence[Contender], width: float, height: float) -> tuple[Scale, Scale]:
    sizes, speeds = [who.nbytes for who in contenders], [who.speed.value for who in contenders]
    highs = max(who.speed.high for who in contenders)
    left, right = padded(sizes, 0.08)
    wide = min(sizes) > 0 and max(sizes) > 10 * min(sizes)
    tall = min(speeds) > 0 and max(speeds) > 15 * min(speeds)
    x = Scale(
        low=min(sizes) / 1.3 if wide else left,
        high=max(sizes) * 1.3 if wide else right,
        start=LEFT,
        stop=width - 14,
        log=wide,
    )
    bottom = min(min(speeds), *(who.speed.low or 1 for who in contenders)) / 1.3 if tall else 0.0
    y = Scale(low=bottom, high=1.08 * highs or 1.0, start=height - BELOW, stop=TOP, log=tall)
    return x, y


def _axes(x: Scale, y: Scale) -> Markup:
    parts = []
    for tick in log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high):
        parts.append(element("path", d=f"M{x.start:g} {y(tick):.1f}H{x.stop:g}", stroke="var(--grid)"))
        parts.append(text(x.start - 8, y(tick) + 4, plain(tick), size=11, fill="var(--soft)", anchor="end"))
    room = max(3, int((x.stop - x.start) / 95))
    for tick in log_ticks(x.low, x.high) if x.log else byte_ticks(x.low, x.high, room):
        parts.append(element("path", d=f"M{x(tick):.1f} {y.stop:g}V{y.start:g}", stroke="var(--grid)"))
        parts.append(text(x(tick), y.start + 17, nbytes(tick), size=11, fill="var(--soft)", anchor="middle"))
    parts.append(element("path", d=f"M{x.start:g} {y.start:g}H{x.stop:g}", stroke="var(--soft)"))
    middle = (x.start + x.stop) / 2
    parts.append(text(middle, y.start + 38, "device bytes at the peak", fill="var(--soft)", anchor="middle"))
    turned = {"transform": f"translate(13 {(y.start + y.stop) / 2:.1f}) rotate(-90)"}
    parts.append(element("g", text(0, 0, "tokens a second", fill="var(--soft)", anchor="middle"), **turned))
    return Markup("").join(parts)


def _line(front: Sequence[Contender], x: Scale, y: Scale, **look: str | float) -> Markup:
    """A stair: as many bytes buy the speed of the mark to the left."""
    first, *rest = front
    steps = "".join(f"H{x(who.nbytes):.1f}V{y(who.speed.value):.1f}" for who in rest)
    path = f"M{x(first.nbytes):.1f} {y.start:.1f}V{y(first.speed.value):.1f}{steps}H{x.stop:g}"
    return element("path", d=path, fill="none", **look)


def _walls(front: Sequence[Contender], x: Scale, y: Scale) -> list[tuple[float, float, float, float]]:
    """Where the line runs, so that no name is struck through."""
    ends = [*(x(who.nbytes) for who in front[1:]), x.stop]
    heights = [y(who.speed.value) for who in front]
    flat = [
        (x(who.nbytes), up - 1, end - x(who.nbytes), 2.0) for who, up, end in zip(front, heights, ends, strict=True)
    ]
    below = [y.start, *heights[:-1]]
    return flat + [(x(who.nbytes) - 1, up, 2.0, low - up) for who, up, low in zip(front, heights, below, strict=True)]


def _mark(who: Contender, share: float | None, x: Scale, y: Scale, low: float, high: float) -> Markup:
    paint = "var(--blank)" if share is None else shade("accuracy", (share - low) / ((high - low) or 1))[0]
    across, up = x(who.nbytes), y(who.speed.value)
    tip = [who.name, *filter(None, [who.settings]), f"{plain(who.speed.value)} tokens/s"]
    tip.append(f"at least {nbytes(who.nbytes)}" if who.counted else nbytes(who.nbytes))
    tip.append(f"{percent(share)} right" if share is not None else "no accuracy")
    parts = []
    if who.speed.runs > 1:
        tip.append(f"{plain(who.speed.low)} to {plain(who.speed.high)} tokens/s in runs")
        low_end = y(max(who.speed.low, y.low))
        parts.append(element("path", d=f"M{across:.1f} {low_end:.1f}V{y(who.speed.high):.1f}", stroke="var(--soft)"))
    parts.append(_shape(who.kind, across, up, paint))
    data = {"data_tip": "\n".join(tip), "data_name": who.name, "data_speed": who.speed.value, "data_bytes": who.nbytes}
    return element("g", *parts, class_="mark", data_accuracy=share, **data)


def _shape(kind: str, x: float, y: float, paint: str) -> Markup:
    look = {"fill": paint, "stroke": "var(--ink)", "stroke_width": 1}
    if kind == "sweep":
        return element("circle", cx=x, cy=y, r=5.0, **look)
    if kind == "policy":
        return element("rect", x=x - 5.5, y=y - 5.5, width=11.0, height=11.0, rx=2, **look)
    return element("path", d=f"M{x:.1f} {y - 7.5:.1f}l7.5 7.5l-7.5 7.5l-7.5 -7.5Z", **look)


def shapes_panel(kinds: Sequence[str]) -> Panel:
    """What shapes mean."""
    parts, place = [], 8.0
    for kind in kinds:
        parts.append(_shape(kind, place, 10, "var(--blank)"))
        parts.append(text(place + 13, 14, KINDS[kind], size=11))
        place += 34 + width_of(KINDS[kind], 11)
    label = "shapes: " + ", ".join(KINDS[kind] for kind in kinds)
    return Panel(width=place, height=20, body=Markup("").join(parts), label=label, key=True)
