"""A cell is a call. Its colour is the policy that takes the least, and its figure says how many times as much the next
policy takes. ≈: they differ no more than rounds do, or than `none` measured twice does. The colour is then that of the
simplest of them. Thick lines part calls with other winners. A budget is the share of the keys and values that fits the
device. Steps are those of a block; the width is the model's."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from measuring.statistics import noise_floor
from measuring.winners import contests

from charts.rows import Row, good, panels
from charts.theme import LIGHT, alt, colour, data, ink_on, policy_colours, rank, side_by_side

FACETS = ("model", "layers", "threshold", "budget", "link", "steps", "width")
CALL = (*(name for name in FACETS if name != "link"), "context", "blocks", "link")
FIGURES = ("seconds", "device_bytes", "host_bytes", "rows_computed", "moved_bytes")
COLUMNS = (*FACETS, "context", "blocks", "policy", *FIGURES)
BEST, AGAIN = {"seconds": "fastest", "device_bytes": "smallest"}, "none-again"
table = list  # a call that every policy refuses has a cell, too


def winners(rows: Sequence[Row], figure: str) -> list[Row]:
    """The policy with the least `figure` in every call, None if all policies refused it. `told`: the figure of the next
    policy over the least. "right", "up": True if the neighbour there has another winner."""
    calls = contests(rows, CALL)
    twice = [(own[AGAIN], own["none"]) for key, own in calls.items() if {AGAIN, "none"} <= own.keys() and not key[-1]]
    floor = noise_floor(
        [again[figure] / plain[figure] for again, plain in twice if figure in again and figure in plain]
    )
    noise, cells = 1 + (floor["p80"] if floor else 0.0), dict[tuple[Any, ...], Row]()
    for key, own in calls.items():
        ranked = sorted((row for row in good(own.values()) if row["policy"] != AGAIN), key=lambda row: row[figure])
        at = dict(zip(CALL, key, strict=True))
        if not ranked:
            cells[key] = at | {"policy": None, "told": "refused"}
            continue
        most = max(ranked[0].get(f"{figure}_high", 0), ranked[0][figure] * noise)
        alike = [row for row in ranked if row.get(f"{figure}_low", row[figure]) <= most]
        best = min(alike, key=lambda row: rank(row["policy"]))
        apart = f"{ranked[1][figure] / best[figure]:.1f}\N{MULTIPLICATION SIGN}" if ranked[1:] else ""
        cells[key] = at | {"policy": best["policy"], "told": "≈" if alike[1:] else apart}
    contexts, blocks = (sorted({cell[name] for cell in cells.values()}) for name in ("context", "blocks"))
    for (*of, context, block, link), cell in cells.items():
        beside = ((*of, each, block, link) for each in contexts if each > context)
        above = ((*of, context, each, link) for each in blocks if each > block)
        right, up = (next((cells[key] for key in keys if key in cells), cell) for keys in (beside, above))
        cell |= {"right": right["policy"] != cell["policy"], "up": up["policy"] != cell["policy"]}
    return list(cells.values())


def chart(rows: Sequence[Row], width: int, figure: str) -> alt.TopLevelMixin:
    """A map of context and blocks for every other setting."""
    cells = winners(rows, figure)
    colours = policy_colours(cell["policy"] for cell in cells if cell["policy"])
    inks = {policy: ink_on(paint) for policy, paint in colours.items()}
    keep, paint = ("context", "blocks", "policy", "told", "right", "up"), colour("policy", colours, width)
    bare = alt.Axis(domain=False, ticks=False, labelAngle=0)

    def draw(own: Sequence[Row], inner: int) -> Any:
        values = [{name: c[name] for name in keep} | {"ink": inks.get(c["policy"], LIGHT["soft"])} for c in own]
        blocks = sorted({cell["blocks"] for cell in own}, reverse=True)
        x, y = alt.X("context:O", title="context, tokens", axis=bare), alt.Y("blocks:O", sort=blocks, axis=bare)
        base = data(values).encode(x, y)
        lines = base.mark_rule(stroke=LIGHT["ink"], strokeWidth=2.5, strokeCap="round")
        top = alt.Y("blocks:O", sort=blocks, bandPosition=0)
        up = alt.X("context:O", bandPosition=0), alt.X2("context", bandPosition=1), top
        right = alt.X("context:O", bandPosition=1), top, alt.Y2("blocks", bandPosition=1)
        layers = (
            base.mark_rect(stroke=LIGHT["card"]).encode(color=paint),
            base.mark_text(fontWeight=600).encode(text="told:N", color=alt.Color("ink:N", scale=None)),
            *(lines.transform_filter(f"datum.{way}").encode(*at) for way, at in (("right", right), ("up", up))),
        )
        return alt.layer(*layers).properties(width=inner, height=30 * len(blocks))

    return side_by_side(panels(cells, FACETS), width, draw, margin=62, least=290)


def says(rows: Sequence[Row], figure: str) -> str:
    """The number of calls that each policy wins, and the shortest context of them."""
    cells, told = [cell for cell in winners(rows, figure) if cell["policy"]], list[str]()
    for policy, count in Counter(cell["policy"] for cell in cells).most_common():
        begin = min(cell["context"] for cell in cells if cell["policy"] == policy)
        since = f", from {begin} tokens on" if begin > min(cell["context"] for cell in cells) else ""
        told.append(f"`{policy}` in {count}{'' if told else f' of {len(cells)} calls'}{since}")
    return f"The {BEST[figure]} policy is {'; '.join(told)}" if told else "Every policy refuses every call"
