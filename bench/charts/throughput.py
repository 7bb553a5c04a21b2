"""Higher is better. A mark is the median of the rounds, its stroke the 20th to the 80th percentile. Both axes are
logarithmic."""

from collections.abc import Sequence
from typing import Any

from charts.rows import Row, good, panels
from charts.theme import alt, colour, data, policy_colours, side_by_side

CALL = ("model", "width", "layers", "batch", "confidence")
COLUMNS = (
    *(*CALL, "context", "policy", "tokens_per_second", "tokens_per_second_low", "tokens_per_second_high"),
    *("tokens_per_forward", "nfe", "ms_per_forward", "first_block_ms", "device_bytes", "host_bytes"),
)
table = good


def chart(rows: Sequence[Row], width: int) -> alt.TopLevelMixin:
    """A panel for each model, batch and commit rule."""
    colours, speeds = policy_colours(row["policy"] for row in rows), [row["tokens_per_second"] for row in rows]
    contexts = sorted({row["context"] for row in rows})
    ticks = [digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5)]
    reach = alt.Scale(type="log", nice=False, domain=[0.8 * min(speeds), 1.25 * max(speeds)])
    x = alt.X("context:Q", title="context, tokens", scale=alt.Scale(type="log", nice=False, padding=14))
    x = x.axis(values=contexts, grid=False, labelOverlap=True, format="d")
    y = alt.Y("tokens_per_second:Q", title="tokens/s", scale=reach).axis(values=ticks, format="~g")

    def draw(own: Sequence[Row], inner: int) -> Any:
        values = []
        for row in own:
            speed = {"tokens_per_second": row["tokens_per_second"], "context": row["context"], "policy": row["policy"]}
            ends = {end: row.get(f"tokens_per_second_{end}", row["tokens_per_second"]) for end in ("low", "high")}
            values.append(speed | ends)
        base = data(values).encode(x, color=colour("policy", colours, width))
        lines = base.mark_line(point=alt.OverlayMarkDef(size=36, filled=True)).encode(y)
        return alt.layer(lines, base.mark_rule().encode(alt.Y("low:Q"), y2="high")).properties(width=inner, height=230)

    return side_by_side(panels(rows, CALL), width, draw, margin=62, least=320)


def says(rows: Sequence[Row]) -> str:
    """The fastest policy at the shortest and at the longest context."""
    told = []
    for context in sorted({min(row["context"] for row in rows), max(row["context"] for row in rows)}):
        best = max((r for r in rows if r["context"] == context), key=lambda row: row["tokens_per_second"])
        told.append(f"`{best['policy']}` with {best['tokens_per_second']:.3g} tokens/s at {context} tokens")
    return f"The fastest is {' and '.join(told)}"
