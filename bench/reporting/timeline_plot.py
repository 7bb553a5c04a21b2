"""The stacked bytes of one tier over the forwards of a call."""

from typing import Any

from markupsafe import Markup

from reporting.account_names import LINE, names_below, names_beside
from reporting.accounts import TIERS, account_series, cap_of, paint, total
from reporting.scales import Scale, byte_ticks
from reporting.svg import element, text
from reporting.wording import nbytes


def tier_plot(
    call: dict[str, Any], tier: str, x: Scale, top: float, height: float, width: float | None
) -> tuple[Markup, float]:
    """A tier from `top`; returns it with the place under it. `width` of the panel: names stand beside; None: below."""
    samples, series = call["timeline"], account_series(call, tier)
    cap = cap_of(call, tier)
    highest = max(total(sample, tier) for sample in samples)
    near = cap if cap is not None and cap <= 1.6 * highest else None
    y = Scale(low=0, high=1.06 * max(highest, near or 0), start=top + 22 + height, stop=top + 22)
    parts = [text(x.start, top + 13, TIERS[tier], size=13, font_weight=600, fill=f"var(--{tier})")]
    for tick in byte_ticks(0, y.high, 4 if height > 100 else 2):
        parts.append(element("path", d=f"M{x.start:g} {y(tick):.1f}H{x.stop:g}", stroke="var(--grid)"))
        parts.append(
            text(x.start - 8, y(tick) + 4, nbytes(tick) if tick else "0", size=11, fill="var(--soft)", anchor="end")
        )
    floor = [0] * len(samples)
    middles = {}
    for account, sizes in series.items():
        ceiling = [low + size for low, size in zip(floor, sizes, strict=True)]
        parts.append(element("path", d=_area(floor, ceiling, x, y), fill=paint(account), data_account=account))
        middles[account] = (y(floor[-1]) + y(ceiling[-1])) / 2
        floor = ceiling
    for before, number in zip(samples, range(1, len(samples)), strict=False):
        if samples[number]["block"] != before["block"]:
            at = f"M{x(number):.1f} {y.stop:.1f}V{y.start:.1f}"
            parts.append(element("path", d=at, stroke="var(--card)", stroke_width=1.2, opacity=0.7))
    if near is not None:
        parts.append(
            element("path", d=f"M{x.start:g} {y(near):.1f}H{x.stop:g}", stroke="var(--warn)", stroke_dasharray="5 4")
        )
        parts.append(text(x.stop, y(near) - 5, f"cap {nbytes(near)}", size=11, fill="var(--warn)", anchor="end"))
    elif cap is not None:
        parts.append(
            text(x.stop, top + 13, f"cap {nbytes(cap)}, above the plot", size=11, fill="var(--warn)", anchor="end")
        )
    parts.append(element("path", d=f"M{x.start:g} {y.start:.1f}H{x.stop:g}", stroke="var(--soft)"))
    parts.extend(_pointers(samples, tier, x, y))
    if width is not None:
        parts.append(names_beside(series, middles, x.stop + 12, y))
        return Markup("").join(parts), y.start + 34
    names, rows = names_below(series, y.start + 34, x.start, x.stop)
    return Markup("").join([*parts, names]), y.start + 40 + LINE * rows


def _area(floor: list[int], ceiling: list[int], x: Scale, y: Scale) -> str:
    """A stair on both sides."""
    up = "".join(f"V{y(top):.1f}H{x(number + 1):.1f}" for number, top in enumerate(ceiling))
    down = "".join(f"V{y(floor[number]):.1f}H{x(number):.1f}" for number in reversed(range(len(floor))))
    return f"M{x(0):.1f} {y(floor[0]):.1f}{up}{down}Z"


def _pointers(samples: list[dict[str, Any]], tier: str, x: Scale, y: Scale) -> list[Markup]:
    """A column over each sample that says what it holds."""
    found = []
    for number, sample in enumerate(samples):
        accounts = sorted(sample["tiers"].get(tier, {}).items(), key=lambda item: -item[1])
        place = (
            "before the first forward" if sample["forward"] < 0 else f"forward {sample['forward']}, {sample['kind']}"
        )
        tip = [f"{place}, block {sample['block']}", f"{tier}: {nbytes(total(sample, tier))}"]
        tip += [f"{account} {nbytes(size)}" for account, size in accounts if size]
        box = {"x": x(number), "y": y.stop, "width": x(number + 1) - x(number), "height": y.start - y.stop}
        found.append(element("rect", **box, fill="transparent", class_="column", data_tip="\n".join(tip)))
    return found
