"""Up and to the left is better: more tokens a second in less memory. A filled mark is within 2 points of the best
accuracy of its panel; an open one is not. The line joins the filled marks that no other beats in both size and speed.
Speeds are those of the longest prompts, and each panel is another call. ≥: the bytes are those of weights and cached
tensors, without the memory of a pass, so no line goes through the mark."""

from collections.abc import Sequence
from typing import Any

from charts.rows import Row, byte_unit, good, panels, points, shown
from charts.theme import LIGHT, alt, data, policy_colours, side_by_side

CALL = ("study", "model", "noise", "rule", "context", "batch", "confidence", "answer", "block", "budget")
COLUMNS = (
    *(*CALL, "policy", "clusters", "top_m", "update_threshold", "codec", "tokens_per_second", "device_bytes"),
    *("accuracy", "correct", "examples", "frontier"),
)
WITHIN, HEIGHT, LINE = 0.02, 360, 15.5  # share below the best accuracy; pixels of a panel, and of a line of names


def table(rows: Sequence[Row]) -> list[Row]:
    """Points with "right" and "frontier". A right point is within 2 points of the best accuracy of its call. It is on
    the frontier if no other right point is as small and as fast."""
    found = []
    for own in panels(good(points(rows, longest=True)), CALL).values():
        best, fastest = max(row["accuracy"] for row in own), 0.0
        for row in sorted(own, key=lambda row: (row["device_bytes"], -row["tokens_per_second"])):
            right = row["accuracy"] >= best - WITHIN
            ahead = right and row["tokens_per_second"] > fastest and row.get("bytes") != "counted"
            fastest = row["tokens_per_second"] if ahead else fastest
            found.append(row | {"right": right, "frontier": ahead})
    return found


def names(rows: Sequence[Row], most: float) -> list[Row]:
    """The fastest point of each policy, a right one if there is one, with its name and "place". That is the height of
    the name in its column, in the unit of speed up to `most`; no two names touch."""
    fastest = {row["policy"]: row for row in sorted(rows, key=lambda row: (row["right"], row["tokens_per_second"]))}
    own, line, places = sorted(fastest.values(), key=lambda row: row["tokens_per_second"]), LINE * most / HEIGHT, []
    for row in own:
        places.append(max(row["tokens_per_second"], places[-1] + line if places else 0.0))
    for number in reversed(range(len(own))):
        places[number] = min(places[number], most - line * (len(own) - 1 - number))
    counted = ("≥ " if row.get("bytes") == "counted" else "" for row in own)
    return [row | {"place": p, "name": sign + row["policy"]} for row, p, sign in zip(own, places, counted, strict=True)]


def chart(rows: Sequence[Row], width: int) -> alt.TopLevelMixin:
    """A panel for each call, with the names of policies in a column beside it."""
    colours = policy_colours(row["policy"] for row in rows)
    word, unit = byte_unit(max(row["device_bytes"] for row in rows))

    def draw(own: Sequence[Row], inner: int) -> Any:
        sizes, high = [row["device_bytes"] / unit for row in own], 1.05 * max(row["tokens_per_second"] for row in own)
        spare = 0.06 * (max(sizes) - min(sizes) or max(sizes))
        low, edge = min(sizes) - spare, max(sizes) + spare

        def spot(row: Row) -> Row:
            paint = colours[row["policy"]]
            at = {"size": row["device_bytes"] / unit, "speed": row["tokens_per_second"], "edge": edge, "stroke": paint}
            keep = {name: row[name] for name in ("policy", "frontier", "name", "place") if name in row}
            return at | keep | {"fill": paint if row["right"] else LIGHT["card"]}

        across, axis = alt.Scale(domain=[low, edge], nice=False), alt.Axis(tickCount=5)
        x = alt.X("size:Q", scale=across, title=f"peak on the device, {word}", axis=axis)
        y = alt.Y("speed:Q", scale=alt.Scale(domain=[0, high], nice=False), title="tokens/s")
        spots, labels = data(map(spot, own)).encode(x, y), data(map(spot, names(own, high)))
        dots = spots.mark_point(filled=True, size=65, strokeWidth=1.8, opacity=1)
        line = spots.transform_filter("datum.frontier").mark_line(interpolate="step-after", strokeWidth=1.2)
        leaders = labels.mark_rule(stroke=LIGHT["line"], strokeWidth=0.8).encode(x, y, x2="edge", y2="place")
        text = labels.mark_text(align="left", dx=4).encode(alt.X("edge:Q"), alt.Y("place:Q"), text="name:N")
        paints = alt.Fill("fill:N", scale=None), alt.Stroke("stroke:N", scale=None)
        layers = leaders, line.encode(stroke=alt.value(LIGHT["ink"])), dots.encode(*paints), text
        return alt.layer(*layers).properties(width=inner, height=HEIGHT)

    return side_by_side(panels(rows, CALL), width, draw, margin=248, least=330)


def says(rows: Sequence[Row]) -> str:
    """The fastest and the smallest of the right points, in the panel with most points."""
    own = max(panels(rows, CALL).values(), key=len)
    right = [row for row in own if row["right"]]
    fast, small = max(right, key=lambda row: row["tokens_per_second"]), min(right, key=lambda row: row["device_bytes"])
    best = shown("accuracy", max(row["accuracy"] for row in own))
    told = f"Within 2 points of the best accuracy ({best}), the fastest is {_told(fast)}"
    return f"{told}; it is the smallest, too" if fast is small else f"{told}; the smallest {_told(small)}"


def _told(row: Row) -> str:
    return f"`{row['policy']}`, {row['tokens_per_second']:.3g} tokens/s in {shown('bytes', row['device_bytes'])}"
