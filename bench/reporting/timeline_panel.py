"""One call's memory: a plot for each tier, under a strip of pass kinds."""

from typing import Any

from markupsafe import Markup

from reporting.accounts import TIERS, account_series, total
from reporting.scales import Scale
from reporting.svg import Panel, element, text, width_of
from reporting.timeline_plot import tier_plot

STRIP = {"refresh": 14.0, "update": 10.0, "step": 4.0}
LEFT = 66.0


def timeline_panel(call: dict[str, Any], width: float) -> Panel:
    """The tiers of a call that ever held bytes, one under the other."""
    samples = call["timeline"]
    wide = width > 600
    right = width - (190.0 if wide else 6.0)
    x = Scale(low=0, high=len(samples), start=LEFT, stop=right)
    parts = [_strip(samples, x)]
    y = 44.0
    tiers = [tier for tier in TIERS if account_series(call, tier)]
    most = {tier: max(total(sample, tier) for sample in samples) for tier in tiers}
    for tier in tiers:
        height = 230.0 if tier == "device" else max(70.0, min(150.0, 230.0 * most[tier] / max(most.values())))
        drawn, below = tier_plot(call, tier, x, y, height, width if wide else None)
        parts.append(drawn)
        y = below
    parts.append(_forwards(samples, x, y - 22))
    label = f"bytes by tier and account over {len(samples)} forwards of {call['name']}; the table below has the figures"
    return Panel(width=width, height=y + 14, body=Markup("").join(parts), label=label)


def _strip(samples: list[dict[str, Any]], x: Scale) -> Markup:
    parts = []
    place = LEFT
    for kind in STRIP:
        parts.append(element("rect", x=place, y=2, width=9, height=9, rx=1.5, fill=f"var(--{kind})"))
        parts.append(text(place + 14, 10.5, kind, size=11, fill="var(--soft)"))
        place += 30 + width_of(kind, 11)
    for number, sample in enumerate(samples):
        if size := STRIP.get(sample["kind"]):
            wide = x(number + 1) - x(number)
            box = {"x": x(number) + 0.1 * wide, "y": 32 - size, "width": 0.8 * wide, "height": size}
            parts.append(element("rect", **box, fill=f"var(--{sample['kind']})", data_kind=sample["kind"]))
    return Markup("").join(parts)


def _forwards(samples: list[dict[str, Any]], x: Scale, y: float) -> Markup:
    """Numbers of forwards under the lowest plot."""
    every = max(1, -(-len(samples) // 8))
    parts = [
        text(x(number + 0.5), y + 4, str(sample["forward"]), size=11, fill="var(--soft)", anchor="middle")
        for number, sample in enumerate(samples)
        if sample["forward"] >= 0 and sample["forward"] % every == 0
    ]
    return Markup("").join(
        [*parts, text((x.start + x.stop) / 2, y + 22, "forward", fill="var(--soft)", anchor="middle")]
    )
