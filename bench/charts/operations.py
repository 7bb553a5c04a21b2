"""A bar is the time of a forward by operation, each without those inside it. Shorter is better."""

from collections.abc import Sequence
from typing import Any

from charts.rows import Row, good, panels
from charts.theme import LIGHT, alt, colour, data, side_by_side

CALL = ("model", "width", "layers", "positions", "answer", "batch", "confidence", "dtype")
COLUMNS = (*CALL, "policy", "op", "ms", "share", "count", "wall_ms", "covered", "forwards")
REST, PAINTS = "all others", ("key", "centroids", "hidden_states", "staging", "value", "logits", "ffn_out")
table = good


def totals(rows: Sequence[Row]) -> dict[str, float]:
    """The share of the wall clock that each operation takes, over all calls; the largest first."""
    shares: dict[str, float] = {}
    for row in rows:
        shares[row["op"]] = shares.get(row["op"], 0.0) + row["share"]
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def chart(rows: Sequence[Row], width: int) -> alt.TopLevelMixin:
    """A panel for each call, with a bar for every policy."""
    ops = dict(zip(totals(rows), (LIGHT[name] for name in PAINTS), strict=False)) | {REST: LIGHT["weights"]}
    bare = alt.Axis(ticks=False, domain=False)

    def draw(own: Sequence[Row], inner: int) -> Any:
        times: dict[tuple[str, str], float] = {}
        for row in own:
            name = (row["policy"], row["op"] if row["op"] in ops else REST)
            times[name] = times.get(name, 0.0) + row["ms"] / row["forwards"]
        policies = list(dict.fromkeys(policy for policy, _ in times))
        bars = [{"policy": p, "op": op, "ms": ms, "place": list(ops).index(op)} for (p, op), ms in times.items()]
        x = alt.X("ms:Q", title="ms a forward", axis=alt.Axis(tickCount=5))
        y = alt.Y("policy:N", title=None, sort=policies, axis=bare)
        chart = data(bars).mark_bar().encode(x, y, colour("op", ops, width), order="place:Q")
        return chart.properties(width=inner, height=26 * len(policies))

    return side_by_side(panels(rows, CALL), width, draw, margin=130, least=330)


def says(rows: Sequence[Row]) -> str:
    """The operation that takes most time, and the share of the wall clock that has a name."""
    op = next(iter(totals(rows)))
    ranked = sorted((row for row in rows if row["op"] == op), key=lambda row: row["share"])
    ends = [f"{100 * row['share']:.0f} % of the time under `{row['policy']}`" for row in (ranked[0], ranked[-1])]
    covered = 100 * min(row["covered"] for row in rows)
    return f"Most goes to {op}: {ends[0]} to {ends[1]}; at least {covered:.0f} % of the wall clock has a name"
