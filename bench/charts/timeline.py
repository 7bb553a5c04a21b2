"""A band's height is the bytes of an account of the ledger, from the weights up; a panel is a tier in a call. Vertical
lines are passes that recompute more than a block."""

from collections.abc import Sequence
from typing import Any

from charts.rows import Row, byte_unit, good, panels, shown
from charts.theme import ACCOUNTS, LIGHT, alt, colour, data, side_by_side

COLUMNS = ("call", "tier", "forward", "block", "pass", "account", "bytes", "checks", "agree")
DASHES = ([1, 0], [4, 2], [1, 2])


def table(rows: Sequence[Row]) -> list[Row]:
    """Rows about bytes, with the number of the call's checks against the allocators, and of those that agree."""
    checks: dict[str, list[bool]] = {}
    for row in rows:
        if row.get("about") == "check":
            checks.setdefault(row["point"], []).append(row["agrees"])
    held = [row for row in good(rows) if row.get("about") == "bytes"]
    of = {point: {"checks": len(own), "agree": sum(own)} for point, own in checks.items()}
    return [row | of.get(row["point"], {}) for row in held]


def chart(rows: Sequence[Row], width: int) -> alt.TopLevelMixin:
    """A panel for each call and tier."""
    named = {name.removesuffix("_states"): LIGHT[name] for name in ACCOUNTS}
    there = {row["account"] for row in rows}
    colours = {name: paint for name, paint in named.items() if name in there}
    colours |= dict.fromkeys(sorted(there - named.keys()), LIGHT["few"])
    passes = sorted({row["pass"] for row in rows} - {"", "step"})
    dashes = alt.Scale(domain=passes, range=list(DASHES[: len(passes)]))
    key = alt.Legend(
        title=None, orient="top", symbolType="stroke", symbolStrokeColor=LIGHT["ink"], symbolStrokeWidth=1.5
    )
    kinds = alt.StrokeDash("pass:N", scale=dashes, legend=key)

    def draw(own: Sequence[Row], inner: int) -> Any:
        word, unit = byte_unit(max(row["bytes"] for row in own))
        held = [{name: row[name] for name in ("forward", "account")} | {"held": row["bytes"] / unit} for row in own]
        held = [row | {"place": list(colours).index(row["account"])} for row in held]
        x = alt.X("forward:Q", axis=alt.Axis(grid=False, tickMinStep=1, tickCount=6), scale=alt.Scale(nice=False))
        areas = (
            data(held)
            .mark_area(interpolate="step-after")
            .encode(
                x,
                alt.Y("held:Q", title=f"held, {word}", stack="zero", axis=alt.Axis(tickCount=5)),
                colour("account", colours, width),
                order="place:Q",
            )
        )
        others = sorted({(row["forward"], row["pass"]) for row in own if row["pass"] in passes})
        lines = data({"forward": forward, "pass": kind} for forward, kind in others)
        rules = lines.mark_rule(stroke=LIGHT["ink"], opacity=0.45, strokeWidth=0.8).encode(x, strokeDash=kinds)
        return alt.layer(areas, rules).properties(width=inner, height=140)

    return side_by_side(panels(rows, ("call", "positions", "tier")), width, draw, margin=64, least=300)


def says(rows: Sequence[Row]) -> str:
    """The most bytes on the device, and whether the books agree with the allocators."""
    sums: dict[tuple[str, int], int] = {}
    for row in rows:
        if row["tier"] == "device":
            sums[row["call"], row["forward"]] = sums.get((row["call"], row["forward"]), 0) + row["bytes"]
    (call, forward), most = max(sums.items(), key=lambda item: item[1])
    found = {row["point"]: (row["agree"], row["checks"]) for row in rows if "checks" in row}.values()
    agree = f"{sum(agree for agree, _ in found)} of {sum(checks for _, checks in found)}"
    told = f"; ledger and allocators agree in {agree} checks" if found else ""
    return f"The most on the device is {shown('bytes', most)}, in forward {forward} of {call}{told}"
